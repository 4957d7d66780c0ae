"""The check that an image's build runs in SGLang's Python."""

import importlib
import importlib.metadata as metadata
from pathlib import Path
from typing import Any

import pytest

from tide_platform.engine import selfcheck
from tide_platform.engine.selfcheck import PluginUnusable, check
from tide_platform.engine.support import UnsupportedSGLang


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions as if SGLang were here; a test may change them."""
    versions = {"sglang": "0.5.14"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(selfcheck, "version", version)
    return versions


def test_the_plugin_is_usable() -> None:
    adapter, entry, modules = check(adapter=False)
    assert adapter == "sglang 0.5.14: adapter tide_platform.engine.adapter_0_5_14"
    assert entry == "entry point tide: tide_platform.engine.plugin:register"
    assert int(modules.split()[0]) > 25


def test_every_module_but_those_that_need_sglang_is_imported() -> None:
    folder = Path(selfcheck.__file__).parent
    left_out = {path.stem for path in folder.glob("*.py")} - {
        name.rpartition(".")[2] for name in selfcheck._modules() if ".engine." in name
    }
    using = {path.stem for path in folder.glob("*.py") if "\nfrom sglang" in path.read_text()}
    assert using and using <= left_out
    assert all(name.startswith((*selfcheck._WITH_SGLANG, "__init__")) for name in left_out)


def test_a_version_without_an_adapter(installed: dict[str, str]) -> None:
    installed["sglang"] = "0.4.9"
    with pytest.raises(UnsupportedSGLang, match=r"0\.4\.9"):
        list(check(adapter=False))


def test_no_sglang(installed: dict[str, str]) -> None:
    installed.clear()
    with pytest.raises(PluginUnusable, match="has no SGLang"):
        list(check(adapter=False))


def test_no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "entry_points", lambda group: [])
    with pytest.raises(PluginUnusable, match="is there 0 times"):
        list(check(adapter=False))


def test_a_module_that_this_python_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        if name.endswith("staging"):
            raise SyntaxError("invalid syntax")
        return importlib.import_module(name)

    monkeypatch.setattr(selfcheck, "import_module", broken)
    with pytest.raises(PluginUnusable, match=r"engine\.staging: SyntaxError"):
        list(check(adapter=False))
