"""Checkpoints of a run: whole or not there.

A checkpoint is a folder ``step-00000012`` of ``state.safetensors`` (weights, which are the fp32 masters,
AdamW's moments, torch's generators), ``state.json`` (everything else) and, last of all, ``COMPLETE``. It is
written beside, synced and renamed; the marker, which holds the checksum of ``state.json``, follows. One that
lacks its marker, or whose bytes are not those that were written, is passed over with the reason said, and an
older one serves.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from safetensors.torch import load_file, save_file

from tide_platform.config import TideError
from tide_platform.config.files import sync

TENSORS, FACTS, MARKER = "state.safetensors", "state.json", "COMPLETE"
KEPT = 2
_NAME = "step-{:08d}"
_BLOCK = 8 << 20


class CheckpointNotWritten(TideError):
    """The disk refused a checkpoint."""

    def __init__(self, folder: Path, step: int, error: OSError):
        super().__init__(
            f"{folder}: the checkpoint of step {step} could not be written: {error.strerror or error}; make "
            "room and start the run again, it goes on from the checkpoint before"
        )
        self.folder, self.step = folder, step


@dataclass(frozen=True)
class Checkpoint:
    """A whole one on disk."""

    folder: Path
    step: int
    facts: dict[str, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / TENSORS)


def write_checkpoint(root: Path, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> Path:
    """Writes the checkpoint of an optimizer step, durable when it returns; then removes all others but the
    :data:`KEPT` - 1 before it. ``tensors`` are contiguous and on the CPU, ``facts`` JSON. Raises
    :class:`CheckpointNotWritten`.
    """
    final = root / _NAME.format(step)
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _fill(temporary, step, tensors, facts)
        if final.exists():  # left by a process that died in between, or written again by a replay
            _remove(final)
        temporary.rename(final)
        sync(root)
        (final / MARKER).write_text(_checksum(final / FACTS))
        sync(final / MARKER)
        sync(final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointNotWritten(root, step, error) from error
    _prune(root, final.name)
    return final


def newest_checkpoint(root: Path, up_to: int) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint of a step of at most ``up_to``, and why each newer one was passed over."""
    passed_over: list[str] = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            found = _read(folder)
        except (OSError, ValueError, KeyError) as error:
            passed_over.append(f"{folder.name}: {error}")
            continue
        if found.step <= up_to:
            return found, passed_over
        passed_over.append(f"{folder.name}: ahead of the {up_to} acknowledged steps")
    return None, passed_over


def remove_checkpoints(root: Path) -> None:
    """Those of a run whose draft is saved."""
    for folder in root.glob("step-*"):
        _remove(folder)


def _fill(folder: Path, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    save_file(tensors, folder / TENSORS)
    own = {"bytes": (folder / TENSORS).stat().st_size, "crc32c": _checksum(folder / TENSORS)}
    (folder / FACTS).write_text(json.dumps({"step": step, "tensors": own, **facts}, indent=1))
    for name in (TENSORS, FACTS):
        sync(folder / name)
    sync(folder)


def _read(folder: Path) -> Checkpoint:
    """Raises OSError, ValueError and KeyError, whose text is the reason."""
    if not (folder / MARKER).is_file():
        raise ValueError(f"no {MARKER}: its writer died")
    if (folder / MARKER).read_text() != _checksum(folder / FACTS):
        raise ValueError(f"{MARKER} does not fit {FACTS}")
    facts = json.loads((folder / FACTS).read_text())
    written, found = facts["tensors"]["bytes"], (folder / TENSORS).stat().st_size
    if written != found:
        raise ValueError(f"{TENSORS}: {found} bytes of {written}")
    if _checksum(folder / TENSORS) != facts["tensors"]["crc32c"]:
        raise ValueError(f"{TENSORS}: wrong checksum")
    return Checkpoint(folder, int(facts["step"]), facts)


def _checksum(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = google_crc32c.extend(crc, block)
    return f"{crc:08x}"


def _prune(root: Path, newest: str) -> None:
    before = sorted(folder for folder in root.glob("step-*") if folder.name < newest)
    # what is ahead of the newest was passed over when the run went on
    ahead = [folder for folder in root.glob("step-*") if folder.name > newest]
    for old in before[: 1 - KEPT] + ahead:
        _remove(old)
    for left in root.glob(".step-*.tmp"):  # of processes that died: a run has one at a time
        shutil.rmtree(left, ignore_errors=True)


def _remove(folder: Path) -> None:
    """The marker first: what is half removed is no checkpoint."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
