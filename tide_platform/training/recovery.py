"""A run on disk: resumable at every acknowledged step.

Training is deterministic: seeds, plan, samples and a checkpoint decide every later weight to the bit (on the
same machine, with the same number of threads; a GPU adds in no fixed order, so there the last bits may
differ). So not every step is checkpointed. Each is *acknowledged* (:mod:`tide_platform.training.progress`),
and every so often one is checkpointed. A run that died goes on from its newest whole checkpoint and computes
the acknowledged steps behind it again; each is compared with its record. Nobody is told of them again, and
where the last one agrees, so do the weights: nothing acknowledged was lost, whenever the run died.

``run.json`` holds the *contract*: everything that decides the result. A run with another one is refused.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tide_platform.config import TideError
from tide_platform.config.files import write_json
from tide_platform.training.checkpoints import Checkpoint, newest_checkpoint, write_checkpoint
from tide_platform.training.progress import JOURNAL, Journal, JournalDamaged, StepRecord
from tide_platform.training.state import State

log = logging.getLogger("tide.train")

RUN = "run.json"
ROUNDING = 1e-2  # a step computed again may differ by so much of its loss on another machine
_SAVING_SHARE = 0.05  # of the time, at most, goes into writing checkpoints
_MOST_NAMED = 6


class ResumeRefused(TideError):
    """A run on disk that was another one's: what decides its result differs."""

    def __init__(self, folder: Path, differing: dict[str, tuple[Any, Any]]):
        shown = [f"{name} was {then}, now is {now}" for name, (then, now) in differing.items()]
        more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
        super().__init__(
            f"{folder}: the run here cannot go on: {'; '.join(shown[:_MOST_NAMED])}{more}; put that back, or "
            "train anew with `--fresh`"
        )
        self.folder, self.differing = folder, differing


class ReplayDiverged(TideError):
    """An acknowledged step, computed again, gave something else."""

    def __init__(self, folder: Path, then: StepRecord, now: StepRecord):
        super().__init__(
            f"{folder}: step {then.step}, computed again, has a loss of {now.loss:.6g} where {then.loss:.6g} "
            "was acknowledged: its samples or the code changed; train anew with `--fresh`"
        )
        self.folder, self.then, self.now = folder, then, now


class Recovery:
    """The durable side of one run. One process at a time uses its folder."""

    def __init__(self, folder: Path, contract: Mapping[str, Any], noted: Mapping[str, Any], every_s: float):
        """``contract`` decides the result, ``noted`` only its last bits (threads, versions); both flat JSON.
        ``every_s``: seconds between checkpoints.

        Raises :class:`ResumeRefused`, :class:`~tide_platform.training.progress.JournalDamaged`.
        """
        self.folder, self._every_s = folder, every_s
        self._run = json.loads(json.dumps({"contract": dict(contract), "noted": dict(noted)}))
        folder.mkdir(parents=True, exist_ok=True)
        self._agree()
        self.journal = Journal(folder / JOURNAL)
        self.replayed = self.diverged = 0
        self._saved_step, self._saved_at, self._took = -1, time.monotonic(), 0.0
        self._found: Checkpoint | None
        if self.journal.cut_bytes:
            log.warning(
                "%s: cut %d bytes of a step that was not acknowledged", folder, self.journal.cut_bytes
            )
        self._found, passed_over = newest_checkpoint(folder, len(self.journal.records))
        for reason in passed_over:
            log.warning("%s: checkpoint passed over: %s", folder, reason)

    @property
    def acknowledged(self) -> list[StepRecord]:
        """All records, also those of earlier processes."""
        return self.journal.records

    def restore(self, state: State) -> dict[str, Any]:
        """Puts the checkpoint into ``state``, which is at its beginning. Returns what :meth:`save` was given
        beside it; empty where there is no checkpoint.
        """
        if (facts := self.facts()) is None:
            return {}
        state.load(self.tensors(), facts)
        return facts["beside"]

    def facts(self) -> dict[str, Any] | None:
        """Of the checkpoint there is: its counters, and as ``beside`` what :meth:`save` was given."""
        return None if self._found is None else self._found.facts

    def tensors(self) -> dict[str, torch.Tensor]:
        """Of the checkpoint that there is."""
        assert self._found is not None
        self._saved_step = self._found.step
        return self._found.tensors()

    def acknowledge(self, record: StepRecord) -> bool:
        """True: the step is new, and now durable. False: it was acknowledged before, and agrees.

        Raises :class:`ReplayDiverged` where it does not, by more than rounding.
        """
        if record.step > len(self.journal.records):
            self.journal.append(record)
            return True
        then = self.journal.records[record.step - 1]
        self.replayed += 1
        if not record.same(then):
            if not math.isclose(record.loss, then.loss, rel_tol=ROUNDING) or record.tokens != then.tokens:
                raise ReplayDiverged(self.folder, then, record)
            if not self.diverged:
                log.warning(
                    "%s: step %d, computed again, differs in its rounding (loss %r, acknowledged %r)",
                    self.folder, then.step, record.loss, then.loss,
                )  # fmt: skip
            self.diverged += 1
        return False

    def due(self) -> bool:
        """Whether the time for a checkpoint has come: slow disks are given fewer, so that training is not
        slowed by more than 5 %.
        """
        since = time.monotonic() - self._saved_at
        return since >= max(self._every_s, self._took / _SAVING_SHARE)

    def save(self, state: State, beside: Mapping[str, Any]) -> None:
        """A checkpoint of ``state``, with something small beside it; none where this step has one already.

        Raises :class:`~tide_platform.training.checkpoints.CheckpointNotWritten`.
        """
        if self.unsaved(state):
            began = time.monotonic()
            self.write(state, state.tensors(), beside, began)

    def unsaved(self, state: State) -> bool:
        """Whether the step has no checkpoint yet."""
        return state.step != self._saved_step

    def write(
        self, state: State, tensors: dict[str, torch.Tensor], beside: Mapping[str, Any], began: float
    ) -> None:
        """:meth:`save`, of tensors that were gathered already since ``began`` (``time.monotonic()``)."""
        facts = {**state.counters(), **self._run, "beside": dict(beside)}
        write_checkpoint(self.folder, state.step, tensors, facts)
        self._saved_step, self._saved_at = state.step, time.monotonic()
        self._took = self._saved_at - began

    def close(self) -> None:
        self.journal.close()

    def _agree(self) -> None:
        """Compares with the run that is there; a new one is written down."""
        path = self.folder / RUN
        if not path.is_file():
            write_json(path, self._run, indent=1)
            return
        try:
            then = json.loads(path.read_text())
        except ValueError as error:
            raise JournalDamaged(path, 1, f"not JSON ({error})") from error
        if differing := _differing(then["contract"], self._run["contract"]):
            raise ResumeRefused(self.folder, differing)
        for name, (before, now) in _differing(then["noted"], self._run["noted"]).items():
            log.warning(
                "%s: %s was %s, now is %s: the last bits of the weights may differ",
                self.folder, name, before, now,
            )  # fmt: skip


def _differing(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = sorted(then.keys() | now.keys())
    return {name: (then.get(name), now.get(name)) for name in names if then.get(name) != now.get(name)}
