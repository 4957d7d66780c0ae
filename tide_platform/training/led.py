"""A run's recovery as all its processes see it: process 0 keeps it on disk, the others follow.

A checkpoint holds whole tensors, so a run goes on with another number of processes, replicated or sharded.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import torch

from tide_platform.training.progress import StepRecord
from tide_platform.training.recovery import Recovery
from tide_platform.training.state import State
from tide_platform.training.world import World


class Keeping(Protocol):
    """What the optimizer loop asks of a recovery; all processes ask, in the same order."""

    @property
    def acknowledged(self) -> list[StepRecord]: ...
    def restore(self, state: State) -> dict[str, Any]: ...
    def acknowledge(self, record: StepRecord) -> bool: ...
    def due(self) -> bool: ...
    def save(self, state: State, beside: Mapping[str, Any]) -> None: ...


class Led:
    """Implements :class:`Keeping` for any number of processes."""

    def __init__(self, world: World, recovery: Recovery | None):
        """``recovery``: in process 0 alone."""
        self._world, self._recovery = world, recovery
        known = world.led(lambda: [asdict(record) for record in self._own.acknowledged])
        self._acknowledged = [StepRecord(**record) for record in known]

    @property
    def acknowledged(self) -> list[StepRecord]:
        return self._acknowledged

    @property
    def _own(self) -> Recovery:
        assert self._recovery is not None
        return self._recovery

    def restore(self, state: State) -> dict[str, Any]:
        facts = self._world.led(lambda: self._own.facts())
        if facts is None:
            return {}
        # process 0 reads the file; the others may not see its disk
        read: dict[str, torch.Tensor] = {}
        self._world.led(lambda: read.update(self._own.tensors()))
        state.load(self._world.handed(read), facts)
        return facts["beside"]

    def acknowledge(self, record: StepRecord) -> bool:
        """The step is done in every process by then: each has given its part of the record."""
        new = self._world.led(lambda: self._own.acknowledge(record))
        if new:
            self._acknowledged.append(record)
        return new

    def due(self) -> bool:
        return self._world.led(lambda: self._own.due())

    def save(self, state: State, beside: Mapping[str, Any]) -> None:
        if not self._world.led(lambda: self._own.unsaved(state)):
            return
        began = time.monotonic()
        tensors = state.tensors(keep=self._world.rank == 0)
        self._world.led(lambda: self._own.write(state, tensors, beside, began))
