"""What the trainer sees of stored samples: references without tensors, and a protocol to get the tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tide_platform.capture.record import Sample, SampleMeta


@dataclass(frozen=True)
class SampleRef(SampleMeta):
    """A stored sample's metadata (every field of :class:`SampleMeta`) and where it lies; no tensors."""

    row_id: int = -1  # stable: survives compaction; new in each dataset


@dataclass(frozen=True)
class Health:
    """A backend's own view of itself."""

    ok: bool
    detail: str


class FeatureStore(Protocol):
    """A backend of captured samples: Lance, durable, is
    :class:`~tide_platform.store.hidden_states.HiddenStates`.
    """

    def put(self, samples: Sequence[Sample], batch_id: str) -> int:
        """Stores all samples or none, visible at once; returns how many. ``batch_id`` is found again by a
        later :meth:`abort` or retry."""
        ...

    def get(self, refs: Sequence[SampleRef]) -> Iterator[Sample]:
        """The samples in the order asked for, checksums verified."""
        ...

    def release(self, refs: Sequence[SampleRef]) -> None:
        """The consumer is done with them; a backend that holds them in memory may drop them."""
        ...

    def abort(self, batch_id: str) -> None:
        """Gives up a :meth:`put` that did not return; nothing of it may be seen after."""
        ...

    def health(self) -> Health: ...
