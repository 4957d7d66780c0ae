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
class Key:
    """What a put returns and a get asks for. Backends need no more than this to find an object."""

    sample_id: str
    generation: int  # of the put: a sample that is put again gets a higher one


@dataclass(frozen=True)
class Health:
    """A backend's own view of itself."""

    ok: bool
    detail: str
    used_bytes: int = 0  # of tensors
    budget_bytes: int | None = None  # None: no bound


class FeatureStore(Protocol):
    """A backend of captured samples. Lance, durable, is
    :class:`~tide_platform.store.lance_features.LanceFeatureStore`; a shared folder is
    :class:`~tide_platform.store.shared_dir.SharedDirFeatureStore`.
    """

    def put(self, samples: Sequence[Sample], batch_id: str) -> list[Key]:
        """Stores all samples or none; visible when it returns, under keys of a new generation.

        Raises :class:`BudgetExceeded`, with nothing stored.
        """
        ...

    def get(self, keys: Sequence[Key]) -> Iterator[Sample]:
        """The samples in the order asked for, lengths and checksums verified, aux states as bf16 bits.

        Raises :class:`SampleReleased` for what was released or aborted, :class:`StaleGeneration` for a key
        of an earlier put, :class:`SamplesMissing` for what never was, :class:`BlobCorrupt` for a short or
        torn object.
        """
        ...

    def release(self, keys: Sequence[Key]) -> None:
        """The consumer is done with them and gets them no more; a backend that is no durable tier drops
        them.
        """
        ...

    def abort(self, batch_id: str) -> None:
        """Gives up a :meth:`put`, whether it returned or not; nothing of it is seen after."""
        ...

    def gc(self) -> int:
        """Frees what released and aborted samples, and writers that died, left behind; bytes."""
        ...

    def health(self) -> Health: ...
