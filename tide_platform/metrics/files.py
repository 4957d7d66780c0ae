"""What lies on this machine: the spool's folder, status files of processes, the journal of a training run.

A process that lives writes its status every few seconds; a file that is older than ``metrics.dead_seconds``
means that it is dead, or was ended. Spool and ingest are always told of, others once they have written.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tide_platform.capture.folder import STATUS_FILE as SPOOL_STATUS
from tide_platform.capture.folder import sealed_segments, size_of
from tide_platform.config import Settings, TideError
from tide_platform.ingest.counts import STATUS_FILE as INGEST_STATUS
from tide_platform.ingest.counts import Counts
from tide_platform.ingest.segments import CORRUPT, REFUSED
from tide_platform.metrics.sheet import Sheet
from tide_platform.training.job import RUN_FOLDER
from tide_platform.training.progress import JOURNAL

MAINTAIN_STATUS = "maintain.json"  # below `state`; `tide maintain` writes it
_UPKEEP = "upkeep_"
_TAIL = 1 << 16  # bytes of a journal: its last line is in them


class NoSpoolFolder(TideError):
    """This machine has no spool."""

    def __init__(self, folder: Path):
        super().__init__(
            f"{folder} is not there: `tide serve` makes it; where no server runs on this machine leave "
            "`files` out of metrics.parts"
        )
        self.folder = folder


class StatusUnreadable(TideError):
    """A status file or a journal holds something else."""

    def __init__(self, path: Path, detail: str):
        super().__init__(f"{path} cannot be read ({detail}); remove it, its process writes it anew")
        self.path = path


def read_files(settings: Settings, clock: Callable[[], float] = time.time) -> Sheet:
    """Raises :class:`NoSpoolFolder`, :class:`StatusUnreadable`, ``OSError``."""
    folder, sheet = settings.spool_folder, Sheet()
    if not folder.is_dir():
        raise NoSpoolFolder(folder)
    _segments(folder, settings.capture.spool_bytes, sheet)
    oldest_alive = clock() - settings.metrics.dead_seconds
    files = [folder / SPOOL_STATUS, folder / INGEST_STATUS, *sorted(folder.glob("ingest-*.json"))]
    for path in (*files, settings.state / MAINTAIN_STATUS):
        status = _status(path)
        if status is None and path.name not in (SPOOL_STATUS, INGEST_STATUS):
            continue
        sheet.put("tide_process_alive", status is not None and status["at"] >= oldest_alive, path.stem)
        if status is not None:
            sheet.put("tide_process_seen_timestamp_seconds", status["at"], path.stem)
            (_spool if path.name == SPOOL_STATUS else _ingest)(path.stem, status, sheet)
    _training(settings, sheet)
    return sheet


def _segments(folder: Path, allowed: int, sheet: Sheet) -> None:
    waiting = [(path, size) for path in sealed_segments(folder) if (size := size_of(path)) is not None]
    sheet.put("tide_spool_segments", len(waiting))
    sheet.put("tide_spool_bytes", sum(size for _, size in waiting))
    sheet.put("tide_spool_bytes_allowed", allowed)
    sheet.put("tide_spool_oldest_timestamp_seconds", _modified(waiting[0][0]) if waiting else None)
    for suffix in (CORRUPT, REFUSED):
        sheet.put("tide_spool_set_aside", sum(1 for _ in folder.glob(f"*{suffix}")), suffix.lstrip("."))


def _spool(process: str, status: Mapping[str, Any], sheet: Sheet) -> None:
    for name, key in (
        ("tide_spool_samples_total", "samples"),
        ("tide_spool_sealed_total", "segments"),
        ("tide_spool_written_bytes_total", "bytes"),
        ("tide_spool_disk_errors_total", "disk_errors"),
    ):
        sheet.put(name, status[key], process)
    for name, key in (
        ("tide_spool_dropped_total", "dropped"),
        ("tide_spool_ring_dropped_total", "ring_dropped"),
    ):
        for reason, count in status[key].items():
            sheet.put(name, count, process, reason)


def _ingest(process: str, status: Mapping[str, Any], sheet: Sheet) -> None:
    for event in Counts().to_json():
        sheet.put("tide_ingest_events_total", status.get(event), process, event)
    for name, count in status.items():
        if name.startswith(_UPKEEP):
            sheet.put("tide_upkeep_events_total", count, process, name.removeprefix(_UPKEEP))


def _training(settings: Settings, sheet: Sheet) -> None:
    """The run that acknowledged a step last; a run's folder goes when its draft is stored."""
    journals = (settings.state / "work").glob(f"{settings.deployment}-*/{RUN_FOLDER}/{JOURNAL}")
    found = [(at, path) for path in journals if (at := _modified(path)) is not None]
    if not found:
        return
    at, path = max(found)
    window = path.parent.parent.name.removeprefix(f"{settings.deployment}-")
    step = _last_step(path)
    if step is not None:
        sheet.put("tide_training_step", step["step"], window)
        sheet.put("tide_training_steps", step["steps"], window)
        sheet.put("tide_training_loss", step["loss"] if step["samples"] else None, window)
        sheet.put("tide_training_tokens", step["tokens"], window)
        sheet.put("tide_training_seen_timestamp_seconds", at, window)


def _last_step(path: Path) -> dict[str, Any] | None:
    """None before the first step. A last line that is not whole was not acknowledged."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            whole, _, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:  # the run has just ended
        return None
    last = whole.rpartition(b"\n")[2]
    return _json(path, last) if last else None


def _status(path: Path) -> dict[str, Any] | None:
    """None where the process never ran."""
    try:
        return _json(path, path.read_bytes())
    except FileNotFoundError:
        return None


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise StatusUnreadable(path, str(error)) from error


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None
