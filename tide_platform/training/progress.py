"""Optimizer steps as they are told of, and the journal that makes one *acknowledged*.

A step is acknowledged once its record is a whole line of the journal, synced to disk; only then is anybody
told of it. What was told of is therefore in the journal, whatever dies when, and a step is in it once.
No torch: whoever reads a run's progress stays light.
"""

import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import TideError
from tide_platform.config.files import sync

JOURNAL = "steps.jsonl"


class JournalDamaged(TideError):
    """The journal of acknowledged steps holds something else than steps in order."""

    def __init__(self, path: Path, line: int, detail: str):
        super().__init__(
            f"{path}, line {line}: {detail}; the run cannot be trusted to go on: train anew with `--fresh`"
        )
        self.path, self.line, self.detail = path, line, detail


class JournalNotWritten(TideError):
    """The disk refused a step's record."""

    def __init__(self, path: Path, step: int, error: OSError):
        super().__init__(
            f"{path}: step {step} could not be acknowledged: {error.strerror or error}; make room and start "
            "the run again, it goes on"
        )
        self.path, self.step = path, step


class Stopped(TideError):
    """Asked to end before the last step; everything acknowledged is kept where the run is on disk."""

    def __init__(self, step: int, steps: int):
        super().__init__(f"stopped after step {step} of {steps}")
        self.step, self.steps = step, steps


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses in nats; accuracy: draft argmax equals the teacher's; both for each unroll
    step.
    """

    step: int  # from 1
    steps: int
    epoch: int  # from 0
    loss: float
    losses: list[float]
    accuracy: list[float]
    learning_rate: float
    grad_norm: float  # before clipping
    samples: int  # of this step that taught something; 0: all were left out, and nothing was updated
    tokens: int  # response tokens seen so far
    seconds: float  # spent in steps so far, waiting and computing
    wait_seconds: float  # of this step: for its samples
    compute_seconds: float  # of this step: forward, backward, update

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def same(self, other: "StepRecord") -> bool:
        """Whether both came of the very same computation, to the bit; times aside."""
        return self._result() == other._result()

    def _result(self) -> tuple[Any, ...]:
        return (
            self.step, self.steps, self.epoch, self.loss, self.losses, self.accuracy, self.learning_rate,
            self.grad_norm, self.samples, self.tokens,
        )  # fmt: skip


class Journal:
    """The acknowledged steps of one run: JSON lines, one a step, from step 1 without a gap."""

    def __init__(self, path: Path):
        """Reads what is there. A last line that a dying process left unfinished is cut off: it was never
        acknowledged. Raises :class:`JournalDamaged`.
        """
        self.path = path
        self.records: list[StepRecord] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        raw = path.read_bytes()
        whole, _, torn = raw.rpartition(b"\n")
        self.cut_bytes = len(torn)
        if torn:
            os.ftruncate(self._descriptor, len(raw) - len(torn))
        for number, line in enumerate(whole.splitlines(), start=1):
            self.records.append(self._read(number, line))
        sync(path.parent)

    def append(self, record: StepRecord) -> None:
        """Acknowledges the step; durable when it returns. Raises :class:`JournalNotWritten`."""
        assert record.step == len(self.records) + 1, f"step {record.step} after {len(self.records)}"
        line = json.dumps(record.to_json()).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise JournalNotWritten(self.path, record.step, error) from error
        self.records.append(record)

    def close(self) -> None:
        os.close(self._descriptor)

    def _read(self, number: int, line: bytes) -> StepRecord:
        try:
            record = StepRecord(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise JournalDamaged(self.path, number, f"no step record ({error})") from error
        if record.step != number:
            raise JournalDamaged(self.path, number, f"step {record.step}, expected {number}")
        return record
