"""A training run's progress and result as its folder shows them: never read from logs."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tide_platform.cluster.faults import ResultMissing
from tide_platform.config import draft_digest
from tide_platform.config.digest import FolderIncomplete
from tide_platform.training.job import DRAFT, RESULT, RUN_FOLDER, TrainResult
from tide_platform.training.progress import JOURNAL

RESULT_WAIT_S, RESULT_POLL_S = 75.0, 1.0  # NFS clients remember for a minute what is not in a folder
_ABOUT = "tide.json"


class StepFollower:
    """Hands on each acknowledged step once, in order, from the journal in ``out``.

    What is in the journal before the trainer has touched it is kept back: it may be of a run that cannot go
    on, which the trainer begins anew.
    """

    def __init__(self, out: Path, on_step: Callable[[dict[str, Any]], None]):
        self._journal, self._on_step = out / RUN_FOLDER / JOURNAL, on_step
        self._found = self._size()
        self._offset, self._last, self._told = 0, b"", 0

    def poll(self) -> None:
        """Reads on, whole lines only. What cannot be read now is read at the next poll: a shared volume shows
        a file's new length before its bytes, or loses it between two calls.
        """
        try:
            records = self._read_on()
        except (OSError, ValueError):
            return
        for record in records:
            self._tell(record)

    def _read_on(self) -> list[dict[str, Any]]:
        """Nothing counts as read where it raises."""
        size = self._size()
        if size in (self._found, self._offset, 0):
            return []
        self._found = -1
        with self._journal.open("rb") as file:
            file.seek(max(0, self._offset - len(self._last)))
            # shorter: begun anew; so it is where it is longer already but another
            anew = size < self._offset or file.read(len(self._last)) != self._last
            start = 0 if anew else self._offset
            file.seek(start)
            whole, newline, _ = file.read(size - start).rpartition(b"\n")
        lines = whole.splitlines() if newline else []
        records = [json.loads(line) for line in lines]
        if anew:
            self._offset, self._last, self._told = 0, b"", 0
        if lines:
            self._offset, self._last = start + len(whole) + 1, lines[-1] + b"\n"
        return records

    def finish(self, result: TrainResult) -> None:
        """The steps that are only in the result: the last ones, or all where the run had been finished."""
        for record in result.history:
            self._tell(record)

    def _tell(self, record: dict[str, Any]) -> None:
        if record["step"] > self._told:
            self._told = record["step"]
            self._on_step(record)

    def _size(self) -> int:
        try:
            return self._journal.stat().st_size
        except FileNotFoundError:
            return 0


def read_result(out: Path, wait_s: float = RESULT_WAIT_S) -> TrainResult:
    """The result of a trainer that ended well, once result, checkpoint and its ``tide.json`` agree.

    Waits so many seconds for a shared volume to show them. Raises :class:`ResultMissing`.
    """
    until = time.monotonic() + wait_s
    while True:
        found = _look(out)
        if isinstance(found, TrainResult):
            return found
        if time.monotonic() >= until:
            path, what = found
            raise ResultMissing(path=path, what=what)
        time.sleep(RESULT_POLL_S)


def _look(out: Path) -> TrainResult | tuple[Path, str]:
    """The result, or which file is wrong and how."""
    path, about, folder = out / RESULT, out / DRAFT / _ABOUT, out / DRAFT
    if not path.is_file():
        return path, "is not there"
    if (result := TrainResult.read(path)) is None:
        return path, "is of another release"
    if not about.is_file():
        return about, "is not there"
    told = json.loads(about.read_text())
    if told.get("parent") != result.parent_digest:
        return about, f"is of a draft trained from {told.get('parent')}, not from {result.parent_digest}"
    try:
        digest = draft_digest(folder)
    except FolderIncomplete as error:
        return folder, f"is not whole ({error.missing})"
    if digest != result.digest:
        return folder, f"is not the draft {result.digest} that {RESULT} tells of"
    return result
