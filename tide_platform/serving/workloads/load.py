"""Reads a workload, built-in or the user's own file, as prompts to send."""

import json
from pathlib import Path
from typing import Any

from tide_platform.serving.workloads.build import BUILDERS, read_workload
from tide_platform.serving.workloads.prompts import SPLITS, Prompt, WorkloadError, digest, hashed_split

_ROLES = {"system", "user", "assistant", "tool"}


def load_workload(name_or_path: str | Path, split: str, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a split, always in the same order.

    ``name_or_path``: ``general``, ``maths``, ``code``, or a JSONL file (see :func:`read_user_file`).
    Raises :class:`WorkloadError`.
    """
    if split not in SPLITS:
        raise WorkloadError(f"split {split}: unknown; there are {' and '.join(SPLITS)}")
    if str(name_or_path) in BUILDERS:
        built = read_workload(str(name_or_path))
        prompts = [Prompt(p.id, _user(p.prompt)) for p in built if p.split == split]
    else:
        prompts = [prompt for where, prompt in read_user_file(Path(name_or_path)) if where == split]
    if not prompts:
        raise WorkloadError(f"workload {name_or_path}: no prompts of split {split}")
    return prompts[:limit]


def read_user_file(path: Path) -> list[tuple[str, Prompt]]:
    """``(split, prompt)`` for each line ``{"prompt": …}`` or ``{"messages": […]}``.

    ``id`` and ``split`` are optional; without a split, 15 % are held out by the hash of the content.
    Raises :class:`WorkloadError`, which names the line.
    """
    if not path.is_file():
        raise WorkloadError(
            f"workload {path}: no such file, and no workload of that name ({', '.join(BUILDERS)})"
        )
    found = []
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_parse(f"{path}:{number}", line))
        except UnicodeDecodeError as error:
            raise WorkloadError(f"workload {path}: not UTF-8: {error.reason}") from error
    if not found:
        raise WorkloadError(f"workload {path}: empty")
    return found


def _parse(where: str, line: str) -> tuple[str, Prompt]:
    try:
        raw = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise WorkloadError(f"{where}: expected an object, found {type(raw).__name__}")
    if ("prompt" in raw) == ("messages" in raw):
        raise WorkloadError(f"{where}: give either `prompt` or `messages`")
    messages = _user(raw["prompt"]) if "prompt" in raw else raw["messages"]
    _check_messages(where, messages)
    content = json.dumps(messages, ensure_ascii=False)
    split = raw.get("split") or hashed_split(content)
    if split not in SPLITS:
        raise WorkloadError(f"{where}: split {split!r}: must be {' or '.join(SPLITS)}")
    return split, Prompt(str(raw.get("id") or f"line-{digest(content)}"), messages)


def _check_messages(where: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise WorkloadError(f"{where}: `messages` must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise WorkloadError(f"{where}: a message needs a `role` of {', '.join(sorted(_ROLES))}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise WorkloadError(f"{where}: a message (or the prompt) needs text in it")


def _user(text: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
