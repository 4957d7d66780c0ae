"""The committer: batches that workers wrote into versions of the dataset, each sample exactly once.

What the dataset holds is read once, at a snapshot, and then kept in step with this process's own commits. A
commit is prepared on that snapshot and conflicts where anybody else committed since
(:mod:`tide_platform.store.commits`): knowledge is then dropped and read again, and so it is after a commit
whose result is unknown. So two committers at once, or one that was paused past its lease, cannot store a
sample twice.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from tide_platform.capture.record import StreamMeta
from tide_platform.ingest.counts import Counts
from tide_platform.store.errors import CommitRaced
from tide_platform.store.pending import Entry

log = logging.getLogger("tide.ingest")
# the ids kept in memory reach this far back, so that samples of a few hours' difference in age share one
# look-up
_MARGIN_SECONDS = 3600.0
_KNOWN_LIMIT = 500_000
# upkeep removes old versions, and a commit needs the one that it was prepared on
_SNAPSHOT_SECONDS = 600.0


class Dataset(Protocol):
    """What the committer needs of :class:`~tide_platform.store.hidden_states.HiddenStates`; a snapshot is a
    version of it, opaque here.
    """

    def ensure(self, stream: StreamMeta) -> None: ...
    def snapshot(self) -> Any: ...  # None: there is no dataset yet
    def committed_segments(self, snapshot: Any) -> set[str]: ...
    def sample_ids(self, since: float, snapshot: Any) -> set[str]: ...
    def commit(self, fragments: Sequence[str], segment_ids: Sequence[str], snapshot: Any) -> Any: ...


class Knowledge:
    """The segments and samples that the dataset holds, at one snapshot of it."""

    def __init__(self, dataset: Dataset):
        self._dataset = dataset
        self.forget()

    def forget(self) -> None:
        """Something else was, or may have been, committed."""
        self._snapshot: Any = None
        self._taken = 0.0
        self._segments: set[str] = set()
        self._samples: set[str] = set()  # captured at or after _floor
        self._floor = float("inf")

    def renew(self) -> None:
        """Between decisions only: what is decided at a snapshot is committed at that snapshot."""
        if time.monotonic() - self._taken > _SNAPSHOT_SECONDS:
            self.forget()

    def snapshot(self) -> Any:
        if self._snapshot is None:
            self._snapshot, self._taken = self._dataset.snapshot(), time.monotonic()
            self._segments = self._dataset.committed_segments(self._snapshot)
        return self._snapshot

    def has_segment(self, segment_id: str) -> bool:
        self.snapshot()
        return segment_id in self._segments

    def known(self, samples: dict[str, float]) -> set[str]:
        """Those of these samples (id -> captured_at) that the dataset has."""
        snapshot = self.snapshot()
        oldest = min(samples.values(), default=float("inf"))
        if oldest < self._floor or len(self._samples) > _KNOWN_LIMIT:
            self._floor = oldest - _MARGIN_SECONDS
            self._samples = self._dataset.sample_ids(self._floor, snapshot)
        return self._samples & set(samples)

    def committed(self, snapshot: Any, entries: Sequence[Entry]) -> None:
        """This process committed these."""
        self._snapshot, self._taken = snapshot, time.monotonic()
        self._segments = {segment for entry in entries for segment in entry.segments}
        self._samples.update(sample for entry in entries for sample in entry.samples)


class Committer:
    """Whoever holds the lease uses it."""

    def __init__(self, dataset: Dataset, counts: Counts, knowledge: Knowledge):
        self._dataset, self._counts, self._known = dataset, counts, knowledge

    def commit(self, entries: Sequence[Entry]) -> list[Entry]:
        """One version of all entries of which the dataset has no sample; returns those that it left out,
        because it has some (then their writer must leave those out and write again) or all.

        All entries are of the dataset's stream. May be called again after any exception.
        """
        self._known.renew()
        accepted: dict[str, Entry] = {}
        taken: set[str] = set()
        for entry in entries:
            if not taken & set(entry.samples) and not self._known.known(entry.samples):
                accepted[entry.entry_id] = entry
                taken |= set(entry.samples)
        if accepted:
            self._commit(list(accepted.values()))
        return [entry for entry in entries if entry.entry_id not in accepted]

    def _commit(self, entries: list[Entry]) -> None:
        fragments = [fragment for entry in entries for fragment in entry.fragments]
        segments = [segment for entry in entries for segment in entry.segments]
        try:
            snapshot = self._dataset.commit(fragments, segments, self._known.snapshot())
        except CommitRaced:
            self._counts.raced += 1
            self._known.forget()
            raise
        except BaseException:  # whether the commit took place is unknown: ask before the next attempt
            self._known.forget()
            raise
        self._known.committed(snapshot, entries)
        self._counts.commits += 1
        samples = sum(len(entry.samples) for entry in entries)
        log.info("committed %d samples of %d segments", samples, len(segments))
