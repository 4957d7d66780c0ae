"""The spool's folder: segments that wait for ingest, the disk budget they may fill, the status file."""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tide_platform.capture.segment import SEALED, CorruptSegment, count_samples

STATUS_FILE = "spool.json"
log = logging.getLogger("tide.spool")


def make_folder(folder: Path) -> None:
    """Makes it, for its owner alone; hidden states give the prompts back."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def sealed_segments(folder: Path) -> list[Path]:
    """Segments that wait for ingest, oldest first."""
    return sorted(folder.glob(f"*{SEALED}"))


def keep_budget(folder: Path, budget_bytes: int) -> int:
    """Deletes the oldest segments that wait for ingest until what waits fits ``budget_bytes``; returns the
    samples in them. One that an ingest worker has claimed stays: it is on its way.
    """
    waiting = [(path, size) for path in sealed_segments(folder) if (size := _size(path)) is not None]
    over, lost = sum(size for _, size in waiting) - budget_bytes, 0
    for path, size in waiting:
        if over <= 0:
            break
        with _claimed(path) as claimed:
            if not claimed:
                continue
            try:
                samples = count_samples(path)
            except CorruptSegment as error:
                log.error("%s; deleted, its samples are not counted", error)
                samples = 0
            path.unlink(missing_ok=True)
        log.error(
            "%s deleted unread: the spool is over its %d bytes; %d samples", path, budget_bytes, samples
        )
        over, lost = over - size, lost + samples
    return lost


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Raises ``OSError``; a reader sees the former status or this one."""
    temporary = folder / f"{STATUS_FILE}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(status, file)
    temporary.rename(folder / STATUS_FILE)


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Claims a segment as an ingest worker does, by a lock of its file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield path.exists()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
