"""The dataset of captured samples: one Lance dataset a deployment, on S3 or in a folder.

A reader that noted a version sees the same rows for as long as they are retained; row ids outlive compaction
and clean-up, versions do not (:class:`VersionGone`).
"""

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import lance

from tide_platform.capture.folder import make_folder
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import Settings
from tide_platform.store import commits, reading
from tide_platform.store import schema as columns
from tide_platform.store.commits import Snapshot
from tide_platform.store.durable import sync_new_files
from tide_platform.store.errors import (
    BlobCorrupt,
    CommitRaced,
    ManifestDamaged,
    NoDataset,
    StoreUnavailable,
    StreamMismatch,
)
from tide_platform.store.feature_store import SampleRef
from tide_platform.store.handle import TIME_INDEX, Handle
from tide_platform.store.location import Location
from tide_platform.store.recovery import recover_manifest

log = logging.getLogger("tide.store")


@dataclass(frozen=True)
class Tip:
    """Where the dataset stands."""

    version: int  # 0: no dataset yet
    rows: int


@dataclass(frozen=True)
class Extent:
    """What the newest version's manifest says."""

    version: int = 0  # 0: no dataset yet
    rows: int = 0
    fragments: int = 0
    data_bytes: int = 0  # of data files; large blobs are files beside them, and not counted
    committed_at: float | None = None  # Unix time, seconds


def dataset_name(settings: Settings) -> str:
    """The dataset's key below ``storage.uri``."""
    return f"{settings.deployment}/hidden_states.lance"


def open_store(settings: Settings) -> "HiddenStates":
    """The deployment's dataset; made by :meth:`HiddenStates.ensure` when its first sample arrives."""
    return HiddenStates(Location.of(settings.storage), dataset_name(settings))


class HiddenStates:
    """One thread at a time uses it."""

    def __init__(self, location: Location, name: str):
        self.handle = Handle(location, name)
        self.uri = self.handle.uri

    def ensure(self, stream: StreamMeta) -> None:
        """Makes the dataset, with its index of ``captured_at``, where there is none; sets a newest version
        that cannot be read aside. Raises :class:`StreamMismatch` where it holds another stream.
        """
        dataset = self._newest()
        if dataset is None:
            self._create(stream)
            dataset = self.handle.require()
        ours = columns.stream_of(dataset.schema)
        if ours != stream:
            raise StreamMismatch(self.uri, ours, stream)

    def tip(self) -> Tip:
        """Version and live rows; two reads however large the dataset is, also where there is none yet."""
        dataset = self.handle.latest()
        return Tip(0, 0) if dataset is None else Tip(dataset.version, dataset.count_rows())

    def extent(self) -> Extent:
        """At the cost of a look for the newest version, and of its manifest where it is a new one."""
        dataset = self.handle.latest()
        if dataset is None:
            return Extent()
        with self.handle.errors():
            newest = dataset.get_version()
        said, at = newest["metadata"], newest["timestamp"]
        assert isinstance(at, datetime)
        return Extent(
            dataset.version,
            int(said["total_rows"]),
            int(said["total_fragments"]),
            int(said["total_files_size"]),
            at.timestamp(),
        )

    def stream_meta(self) -> StreamMeta:
        return columns.stream_of(self.handle.require().schema)

    # writing

    def snapshot(self) -> Snapshot | None:
        """The newest version, for a commit to be prepared on; durable, whoever made it and died. None: there
        is no dataset yet. Sets a newest version that cannot be read aside.
        """
        dataset = self._newest(fresh=True)
        if dataset is None:
            return None
        if self.handle.folder:
            sync_new_files(self.handle.folder)
        return Snapshot(dataset.version, dataset)

    def write(self, samples: Sequence[Sample]) -> list[str]:
        """Durable fragments (JSON) that nobody sees before a :meth:`commit`.

        Raises :class:`StreamMismatch`.
        """
        return commits.write(self.handle, self.handle.require(), samples)

    def commit(self, fragments: Sequence[str], segment_ids: Sequence[str], snapshot: Snapshot) -> Snapshot:
        """See :func:`tide_platform.store.commits.commit`."""
        return commits.commit(self.handle, snapshot, fragments, segment_ids)

    def append(self, samples: Sequence[Sample], segment_ids: Sequence[str]) -> Tip:
        """Writes and commits in one call, for a caller that is alone with these samples.

        After :class:`StoreUnavailable` it is unknown whether the commit took place: ask
        :meth:`committed_segments`.
        """
        fragments = self.write(samples)
        while True:
            snapshot = self.snapshot()
            if snapshot is None:
                raise NoDataset(self.uri)
            if segment_ids and set(segment_ids) <= self.committed_segments(snapshot):
                break
            try:
                self.commit(fragments, segment_ids, snapshot)
                break
            except CommitRaced:
                continue
        return self.tip()

    def committed_segments(self, snapshot: Snapshot | None = None) -> set[str]:
        """Ids of the segments in the newest transactions."""
        snapshot = snapshot or self.snapshot()
        return commits.committed_segments(self.handle, snapshot.dataset) if snapshot else set()

    def remove(self, sample_ids: Sequence[str]) -> None:
        """Deletes these rows; for samples that were damaged on their way and are stored again."""
        dataset = self.handle.require(fresh=True)
        with self.handle.errors():
            dataset.delete(f"sample_id IN ({reading.quoted(sample_ids)})")

    # reading

    def refs(self, version: int | None = None, where: str | None = None) -> list[SampleRef]:
        """Metadata of the samples, oldest first, no tensors; empty where there is no dataset.

        ``where`` is SQL over the plain columns, also ``_row_created_at_version > V``. Raises
        :class:`VersionGone`.
        """
        dataset = self.handle.at(version)
        if dataset is None:
            return []
        table = reading.read(self.handle, dataset, list(columns.META), where)
        return [reading.to_ref(row) for row in sorted(table.to_pylist(), key=lambda row: row["_rowid"])]

    def sample_ids(self, since: float = 0.0, snapshot: Snapshot | None = None) -> set[str]:
        """Ids of the samples captured at or after ``since`` (Unix time)."""
        snapshot = snapshot or self.snapshot()
        return set(self._ids(snapshot.dataset, f"captured_at >= {since}")[0]) if snapshot else set()

    def load(
        self, wanted: Sequence[SampleRef] | Sequence[str], version: int | None = None, batch: int = 16
    ) -> Iterator[Sample]:
        """Whole samples in the order asked for, ``batch`` of them read at a time, each blob's crc32c
        verified, aux states as bf16 bits.

        ``wanted``: references or sample ids. Raises :class:`SamplesMissing`, :class:`BlobCorrupt`,
        :class:`VersionGone`.
        """
        if not wanted:
            return
        dataset = self.handle.at(version)
        if dataset is None:
            raise NoDataset(self.uri)
        pairs = reading.resolve(self.handle, dataset, wanted)
        for start in range(0, len(pairs), batch):
            yield from reading.load_batch(self.handle, dataset, pairs[start : start + batch])

    def read_back(
        self, samples: dict[str, float], share: float, rng: random.Random
    ) -> tuple[set[str], list[str]]:
        """(those of these sample ids that the dataset lacks, those whose bytes are damaged).

        ``samples``: sample id -> captured_at. Each is read whole, and its checksums compared, with a
        probability of ``share``.
        """
        dataset = self.handle.require()
        first, last = min(samples.values()), max(samples.values())
        ids, rows = self._ids(dataset, f"captured_at >= {first} AND captured_at <= {last}")
        found = {name: row for name, row in zip(ids, rows, strict=True) if name in samples}
        damaged = []
        for pair in found.items():
            if rng.random() >= share:
                continue
            try:
                list(reading.load_batch(self.handle, dataset, [pair], packed=True))
            except BlobCorrupt as error:
                log.error("%s", error)
                damaged.append(pair[0])
        return set(samples) - set(found), damaged

    def _newest(self, fresh: bool = False) -> lance.LanceDataset | None:
        try:
            return self.handle.latest(fresh)
        except ManifestDamaged:
            log.error("%s", recover_manifest(self.handle))
            return self.handle.latest()

    def _ids(self, dataset: lance.LanceDataset, where: str) -> tuple[list[str], list[int]]:
        table = reading.read(self.handle, dataset, ["sample_id"], where)
        return table["sample_id"].to_pylist(), table["_rowid"].to_pylist()

    def _create(self, stream: StreamMeta) -> None:
        schema = columns.dataset_schema(stream)
        if self.handle.folder:
            make_folder(self.handle.folder)
        try:
            with self.handle.errors():
                dataset = lance.write_dataset(
                    schema.empty_table(),
                    self.uri,
                    schema=schema,
                    mode="create",
                    enable_stable_row_ids=True,
                    storage_options=self.handle.options,
                    session=self.handle.session,
                )
                dataset.create_scalar_index("captured_at", "BTREE", name=TIME_INDEX)
        except CommitRaced:  # another process makes it now
            pass
        except StoreUnavailable as error:
            if "already exists" not in error.what:
                raise
