"""``python -m tide_platform.engine.selfcheck``: whether this Python can serve with capture. Run while an
image is built, where there is no GPU.

SGLang logs and skips a plugin that fails, so what is wrong with an image shows here, and not in a server
without capture.
"""

import argparse
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import ModuleType

from tide_platform.config import TideError
from tide_platform.engine.support import adapter_module, load_adapter

GROUP, NAME = "sglang.srt.plugins", "tide"
# modules that import SGLang, which on a GPU build needs the driver
_WITH_SGLANG = ("adapter_", "sglang_", "targets", "cpu")


class PluginUnusable(TideError):
    """SGLang would start without the plugin."""

    def __init__(self, problem: str):
        super().__init__(f"{problem}; SGLang would serve without capture")
        self.problem = problem


def check(adapter: bool) -> Iterator[str]:
    """What was found, a line a step. ``adapter``: import it, and SGLang with it.

    Raises :class:`PluginUnusable`, :class:`UnsupportedSGLang`.
    """
    try:
        sglang = version("sglang")
    except PackageNotFoundError as error:
        raise PluginUnusable(f"{sys.executable} has no SGLang") from error
    yield f"sglang {sglang}: adapter {adapter_module(sglang)}"
    yield f"entry point {NAME}: {_entry_point()}"
    modules = list(_modules())
    for module in modules:
        _import(module)
    yield f"{len(modules)} modules of the plugin on Python {sys.version.split()[0]}"
    if adapter:
        yield f"imported {load_adapter(sglang).__name__}"


def _entry_point() -> str:
    found = [each for each in entry_points(group=GROUP) if each.name == NAME]
    if len(found) != 1:
        raise PluginUnusable(f"the entry point {NAME} of {GROUP} is there {len(found)} times")
    if not callable(_import(found[0].module).register):
        raise PluginUnusable(f"{found[0].value} cannot be called")
    return found[0].value


def _modules() -> Iterator[str]:
    from tide_platform import capture, engine

    for package in (engine, capture):
        for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not each.name.rpartition(".")[2].startswith(_WITH_SGLANG):
                yield each.name


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except Exception as error:  # whatever it is, SGLang would skip the plugin for it
        raise PluginUnusable(f"{name}: {type(error).__name__}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", action="store_true", help="import the adapter, and SGLang with it")
    try:
        for line in check(parser.parse_args().adapter):
            print(line)
    except TideError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
