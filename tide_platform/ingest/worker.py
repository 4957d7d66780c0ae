"""One ingest worker: segments to fragments, fragments to the committer, which may be itself.

Order of a batch: read and verify the segments → leave out samples that the dataset has → write fragments →
commit (or leave a pending entry for the worker that holds the lease) → find the samples in the dataset and
read some back → delete the segments. A death before the commit leaves files that no version refers to, and
upkeep removes them; a death after it leaves segments that the next start finds committed, and deletes.
"""

import logging
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config.schema import Ingest as Limits
from tide_platform.ingest import committer
from tide_platform.ingest.counts import Counts
from tide_platform.ingest.segments import REFUSED, Segments
from tide_platform.store.errors import CommitRaced, EntryCorrupt, StoreUnavailable, StreamMismatch
from tide_platform.store.lease import StoreLease
from tide_platform.store.pending import Entry, Pending

log = logging.getLogger("tide.ingest")
_ENTRIES_A_COMMIT = 64
_WAITING = 4  # own entries that wait for another worker's commit


class Dataset(committer.Dataset, Protocol):
    """What a worker needs of :class:`~tide_platform.store.hidden_states.HiddenStates`."""

    def write(self, samples: Sequence[Sample]) -> list[str]: ...
    def remove(self, sample_ids: Sequence[str]) -> None: ...
    def read_back(
        self, samples: dict[str, float], share: float, rng: random.Random
    ) -> tuple[set[str], list[str]]: ...


@dataclass(frozen=True)
class _Batch:
    """Segments whose samples are on their way: the new ones in an entry, the others known."""

    paths: list[Path]
    entry: Entry
    duplicates: int


_Ahead = Future[list[tuple[StreamMeta, dict[Path, list[Sample]]]]]  # segments that are being read


class Worker:
    """May be called again after any exception."""

    def __init__(
        self,
        dataset: Dataset,
        pending: Pending,
        lease: StoreLease,
        segments: Segments,
        limits: Limits,
        counts: Counts,
        name: str,
    ):
        self._dataset, self._pending, self._lease = dataset, pending, lease
        self._segments, self._limits, self._counts, self._name = segments, limits, counts, name
        self._known = committer.Knowledge(dataset)
        self._committer = committer.Committer(dataset, counts, self._known)
        self._waiting: list[_Batch] = []
        self._listed = float("-inf")
        self._rng = random.Random()
        self._reader = ThreadPoolExecutor(1, "tide-ingest-read")
        self._ahead: _Ahead | None = None  # the next batch, read while the one before is written

    @property
    def waiting(self) -> bool:
        """Whether something of this worker waits for another one's commit."""
        return bool(self._waiting)

    def step(self, at_once: bool = False) -> bool:
        """One round; whether there was anything to do. ``at_once``: batches need not be due."""
        try:
            return self._step(at_once)
        except BaseException:
            self._give_back()
            self._waiting.clear()
            raise

    def close(self) -> None:
        """Gives up what was not committed: its segments wait again."""
        self._give_back()
        self._reader.shutdown()

    def _give_back(self) -> None:
        if self._ahead:
            wait([self._ahead])
            self._ahead = None
        self._segments.give_back()

    def _step(self, at_once: bool) -> bool:
        was, leading = self._lease.epoch, self._lease.try_hold()
        if leading and self._lease.epoch != was:  # others have committed meanwhile
            self._counts.leases_taken = self._lease.taken
            self._known.forget()
        progress = self._settle()
        own: list[_Batch] = []
        if len(self._waiting) < _WAITING and (batch := self._ahead or self._read(at_once)):
            progress = True
            self._ahead = self._read(at_once)
            own = self._prepare(batch)
        if not leading:
            for batch in own:
                self._pending.put(batch.entry)
            self._waiting += own
            return progress
        return self._lead(own) or progress

    def _read(self, at_once: bool) -> _Ahead | None:
        """Claims the next batch, deletes what was committed before, begins to read the others."""
        paths = self._segments.take(at_once)
        if not paths:
            return None
        done = [path for path in paths if self._known.has_segment(path.stem)]
        if done:
            log.warning("%d segments were committed before and are deleted", len(done))
            self._counts.already_committed += len(done)
            self._segments.delete(done)
        rest = [path for path in paths if path not in done]
        return self._reader.submit(self._segments.read, rest)

    def _prepare(self, ahead: _Ahead) -> list[_Batch]:
        """The new samples of these segments as fragments; segments without any are deleted."""
        batches = []
        for stream, group in ahead.result():
            try:
                self._dataset.ensure(stream)
            except StreamMismatch as error:
                self._counts.refused += len(group)
                for path in group:
                    self._segments.set_aside(path, REFUSED, str(error))
                continue
            if batch := self._write(stream, group):
                batches.append(batch)
        return batches

    def _write(self, stream: StreamMeta, group: dict[Path, list[Sample]]) -> _Batch | None:
        samples = {s.meta.sample_id: s for part in group.values() for s in reversed(part)}
        total = sum(map(len, group.values()))
        times = {name: sample.meta.captured_at for name, sample in samples.items()}
        known = self._known.known(times)
        new = [sample for name, sample in samples.items() if name not in known]
        duplicates = total - len(new)
        if not new:
            self._counts.duplicates += duplicates
            self._counts.segments += len(group)
            self._segments.delete(list(group))
            return None
        fragments = self._dataset.write(new)
        new_times = {name: times[name] for name in times if name not in known}
        ids = [path.stem for path in group]
        return _Batch(list(group), Entry.of(self._name, stream, ids, new_times, fragments), duplicates)

    def _lead(self, own: list[_Batch]) -> bool:
        """Commits what this worker and all others have written."""
        others = self._entries() if own or self._is_time() else []
        entries = [batch.entry for batch in own] + others
        if not entries:
            return False
        try:
            left_out = self._committer.commit(entries)
        except CommitRaced as error:  # known again from the newest version, and tried again
            log.warning("%s", error)
            self._give_back()
            return True
        self._counts.dropped_batches += len(left_out)
        for batch in own:
            self._confirm(batch)
        for entry in others:  # its writer looks into the dataset when it is gone
            self._pending.delete(entry.entry_id)
        return True

    def _is_time(self) -> bool:
        """A listing costs money on some stores: not more often than commits."""
        now = time.monotonic()
        if now - self._listed < self._limits.commit_seconds:
            return False
        self._listed = now
        return True

    def _entries(self) -> list[Entry]:
        found = []
        for entry_id in self._pending.ids()[:_ENTRIES_A_COMMIT]:
            try:
                entry = self._pending.get(entry_id)
                if entry:
                    self._dataset.ensure(entry.stream)
                    found.append(entry)
            except EntryCorrupt as error:
                self._counts.bad_entries += 1
                log.error("%s; kept as %s", error, self._pending.set_aside(entry_id))
            except StreamMismatch as error:  # its writer finds out by itself, and sets the segments aside
                log.error("%s", error)
                self._pending.delete(entry_id)
        return found

    def _settle(self) -> bool:
        """Looks after entries that another worker has committed or dropped meanwhile."""
        settled = [batch for batch in self._waiting if not self._pending.exists(batch.entry.entry_id)]
        self._waiting = [batch for batch in self._waiting if batch not in settled]
        for batch in settled:
            self._confirm(batch)
        return bool(settled)

    def _confirm(self, batch: _Batch) -> None:
        """Deletes the segments if the dataset has all their samples, else gives them back."""
        samples = batch.entry.samples
        missing, damaged = self._dataset.read_back(samples, self._limits.read_back_share, self._rng)
        if damaged:
            self._counts.damaged += len(damaged)
            self._known.forget()
            self._dataset.remove(damaged)
            raise StoreUnavailable(self._name, f"{len(damaged)} samples read back wrong; stored again")
        if missing:
            self._known.forget()
            self._give_back()
            return
        self._counts.samples += len(samples)
        self._counts.duplicates += batch.duplicates
        self._counts.segments += len(batch.paths)
        self._segments.delete(batch.paths)
