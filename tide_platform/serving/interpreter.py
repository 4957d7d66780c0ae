"""The Python that has SGLang: found, and asked for its versions without importing anything heavy."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config import Settings, TideError

_PROBE = """
import importlib.metadata as m, importlib.util as u, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({"sglang": version("sglang"),
    "plugin": any(e.name == "tide" for e in m.entry_points(group="sglang.srt.plugins")),
    "grammar": [name for name in ("xgrammar", "llguidance") if u.find_spec(name)]}))
"""


class InterpreterUnusable(TideError):
    """The Python that should run SGLang cannot."""

    def __init__(self, python: Path, problem: str):
        super().__init__(f"serving.python {python}: {problem}")
        self.python, self.problem = python, problem


@dataclass(frozen=True)
class Interpreter:
    """A Python with SGLang and the platform's plugin."""

    python: Path
    sglang: str
    grammar: tuple[str, ...]  # grammar backends that it has


def find_python(settings: Settings) -> Path:
    """``serving.python``, else ``.venv-serving`` beside the project or here, else this Python."""
    if settings.serving.python:
        return settings.serving.python.expanduser()
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        candidate = root / ".venv-serving" / "bin" / "python"
        if candidate.exists():
            return candidate
    return Path(sys.executable)


def probe_interpreter(python: Path, supported: list[str]) -> Interpreter:
    """Ask ``python`` what it has. ``supported``: SGLang versions that an adapter exists for.

    Raises :class:`InterpreterUnusable`.
    """
    try:
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InterpreterUnusable(python, f"cannot be run: {error}") from error
    if done.returncode:
        raise InterpreterUnusable(python, f"cannot be run: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout)
    versions = ", ".join(supported)
    if found["sglang"] is None:
        raise InterpreterUnusable(
            python, f"has no SGLang; `make setup` makes .venv-serving with sglang {versions}"
        )
    if found["sglang"] not in supported:
        raise InterpreterUnusable(python, f"has sglang {found['sglang']}; adapters exist for {versions}")
    if not found["plugin"]:
        raise InterpreterUnusable(
            python, "lacks the plugin: tide-platform is not installed in it; run `make setup`"
        )
    return Interpreter(python=python, sglang=found["sglang"], grammar=tuple(found["grammar"]))
