"""The spool's folder: segments that wait for ingest, the disk budget they may fill, the status file."""

import fcntl
import json
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO

from tide_platform.capture.segment import SEALED, CorruptSegment, count_samples

STATUS_FILE = "spool.json"
RING_FILE = "server.ring"  # of the server's first data-parallel rank; ring.rank_path has the others'
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
    waiting = [(path, size) for path in sealed_segments(folder) if (size := size_of(path)) is not None]
    over, lost = sum(size for _, size in waiting) - budget_bytes, 0
    for path, size in waiting:
        if over <= 0:
            break
        file = claim(path)
        if file is None:
            continue
        with file:
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


def write_status(path: Path, status: dict[str, Any]) -> None:
    """Raises ``OSError``; a reader sees the former status or this one."""
    temporary = path.with_name(f"{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(status, file)
    temporary.rename(path)


def claim(path: Path) -> BinaryIO | None:
    """Claims a sealed segment until the file is closed, or its process ends; ``None`` where another process
    has it, or it is gone.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    if not path.exists():  # another process deleted it between the two
        file.close()
        return None
    return file


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
