"""Sealed segments into the dataset, each sample exactly once.

Order of a batch: read and verify the segments → leave out samples that the dataset has → one commit that
carries the segments' ids → read it back → delete the segments. A death before the commit leaves files that
no version refers to; a death after it leaves segments whose ids the next start finds in the newest
transactions, and deletes unread.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.segment import CorruptSegment, read_segment, sync_folder
from tide_platform.store.errors import StreamMismatch

log = logging.getLogger("tide.ingest")
CORRUPT, REFUSED = ".bad", ".refused"
# the ids kept in memory reach this far back, so that samples of a few hours' difference in age share one
# look-up
_MARGIN_SECONDS = 3600.0
_KNOWN_LIMIT = 500_000


class Dataset(Protocol):
    """What the committer needs of :class:`~tide_platform.store.hidden_states.HiddenStates`."""

    def ensure(self, stream: StreamMeta) -> None: ...
    def append(self, samples: Sequence[Sample], segment_ids: Sequence[str]) -> object: ...
    def committed_segments(self) -> set[str]: ...
    def sample_ids(self, since: float) -> set[str]: ...


@dataclass
class Counts:
    """Since this process started."""

    samples: int = 0
    commits: int = 0
    segments: int = 0
    duplicates: int = 0  # samples that the dataset had already
    already_committed: int = 0  # segments of a former process that died before it deleted them
    corrupt: int = 0  # segments, set aside as *.bad
    refused: int = 0  # segments of another stream, set aside as *.refused

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class Committer:
    def __init__(self, dataset: Dataset):
        self.counts = Counts()
        self._dataset = dataset
        self._committed: set[str] | None = None  # None: to be asked
        self._known: set[str] = set()  # sample ids in the dataset, captured at or after _floor
        self._floor = float("inf")

    def commit(self, paths: Sequence[Path]) -> None:
        """Stores the samples of these segments and deletes them. May be called again after any exception."""
        if self._committed is None:
            self._committed = self._dataset.committed_segments()
        paths = [path for path in paths if path.exists()]  # an attempt that failed may have got half way
        done = [path for path in paths if path.stem in self._committed]
        if done:
            log.warning("%d segments were committed before and are deleted", len(done))
            self.counts.already_committed += len(done)
            self._delete(done)
        for stream, group in self._read([path for path in paths if path not in done]):
            self._commit_stream(stream, group)

    def _commit_stream(self, stream: StreamMeta, group: dict[Path, list[Sample]]) -> None:
        try:
            self._dataset.ensure(stream)
        except StreamMismatch as error:
            log.error("%s", error)
            for path in group:
                _set_aside(path, REFUSED)
            self.counts.refused += len(group)
            return
        samples = [sample for part in group.values() for sample in part]
        new = self._without_known(samples)
        ids = [path.stem for path in group]
        if new:
            try:
                self._dataset.append(new, ids)
            except BaseException:
                # whether the commit took place is unknown: ask the dataset before the next attempt
                self._committed, self._known, self._floor = None, set(), float("inf")
                raise
            self.counts.commits += 1
        assert self._committed is not None
        self._committed = set(ids)
        self._known.update(sample.meta.sample_id for sample in new)
        self.counts.samples += len(new)
        self.counts.duplicates += len(samples) - len(new)
        self.counts.segments += len(ids)
        self._delete(list(group))
        log.info("committed %d samples of %d segments", len(new), len(ids))

    def _read(self, paths: list[Path]) -> list[tuple[StreamMeta, dict[Path, list[Sample]]]]:
        """The segments by stream; those that are corrupt are set aside, said and counted."""
        groups: dict[StreamMeta, dict[Path, list[Sample]]] = {}
        for path in paths:
            try:
                stream, samples = read_segment(path)
            except CorruptSegment as error:
                aside = _set_aside(path, CORRUPT)
                self.counts.corrupt += 1
                log.error("%s; kept as %s", error, aside.name)
                continue
            groups.setdefault(stream, {})[path] = samples
        return list(groups.items())

    def _without_known(self, samples: list[Sample]) -> list[Sample]:
        """The first of each sample id that the dataset lacks."""
        if not samples:
            return []
        oldest = min(sample.meta.captured_at for sample in samples)
        if oldest < self._floor or len(self._known) > _KNOWN_LIMIT:
            self._floor = oldest - _MARGIN_SECONDS
            self._known = self._dataset.sample_ids(self._floor)
        new: dict[str, Sample] = {}
        for sample in samples:
            if sample.meta.sample_id not in self._known:
                new.setdefault(sample.meta.sample_id, sample)
        return list(new.values())

    def _delete(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink()
        if paths:
            sync_folder(paths[0].parent)


def _set_aside(path: Path, suffix: str) -> Path:
    aside = path.rename(path.with_suffix(suffix))
    sync_folder(path.parent)
    return aside
