"""``code``: functions to write, from the signatures and docstrings of Python's own library."""

import ast
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from tide_platform.serving.workloads.prompts import WorkloadPrompt, digest, hashed_split, position

_SKIPPED = {"antigravity", "idlelib", "lib2to3", "test", "this", "turtledemo"}
_SKIPPED_FOLDERS = {"test", "tests", "__pycache__"}
_DOCSTRING_CHARS = range(41, 700)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def code() -> list[WorkloadPrompt]:
    """More than 2,000 prompts. The sources are read, not imported: importing has side effects.

    Split by the hash of the function's name, so that ``close`` is never asked for on both sides.
    """
    prompts: dict[str, str] = {}
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        for function in _functions(path):
            text = _prompt(function)
            if text is not None:
                prompts.setdefault(text, function.name)
    mixed = sorted(prompts, key=lambda text: position(f"order {text}"))
    return [
        WorkloadPrompt(f"code-{digest(text)}", hashed_split(prompts[text]), prompts[text], text)
        for text in mixed
    ]


def _sources(root: Path) -> Iterator[Path]:
    for name in sorted(sys.stdlib_module_names - _SKIPPED):
        if name.startswith("_"):
            continue
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        for path in sorted((root / name).rglob("*.py")):
            if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts):
                yield path


def _functions(path: Path) -> Iterator[_Function]:
    """Public functions of the module and public methods of its public classes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        module = ast.parse(path.read_bytes())
    for node in module.body:
        members = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
        for member in members:
            if isinstance(member, _Function) and not member.name.startswith("_"):
                yield member


def _prompt(function: _Function) -> str | None:
    """None where the docstring says too little, or too much for a small model."""
    docstring = ast.get_docstring(function)
    if docstring is None or len(docstring) not in _DOCSTRING_CHARS:
        return None
    summary = docstring.split("\n\n")[0].strip()
    return f"Write a Python function `{function.name}({ast.unparse(function.args)})`:\n{summary}"
