"""The dataset of captured samples: one Lance dataset a deployment, on S3 or in a folder.

Versions only grow by appends; a reader that noted a version sees the same rows for as long as they are
retained.
"""

import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lance
import numpy as np
from lance.dataset import LanceOperation, Transaction
from lance.fragment import write_fragments

from tide_platform.capture.record import TENSORS, Sample, StreamMeta
from tide_platform.capture.segment import crc32c
from tide_platform.config import Settings
from tide_platform.store import schema as columns
from tide_platform.store.durable import sync_new_files
from tide_platform.store.errors import (
    BlobCorrupt,
    NoDataset,
    SamplesMissing,
    StoreError,
    StoreUnavailable,
    StreamMismatch,
)
from tide_platform.store.feature_store import Health, SampleRef
from tide_platform.store.location import Location

SEGMENTS_KEY = "tide.segments"
# unbounded, the caches of a process that appends grow by 0.4 MB a commit
_METADATA_CACHE, _INDEX_CACHE = 64 << 20, 8 << 20
_IDS_A_QUERY = 500


@dataclass(frozen=True)
class Tip:
    """Where the dataset stands."""

    version: int  # 0: no dataset yet
    rows: int


def open_store(settings: Settings) -> "HiddenStates":
    """The deployment's dataset; made by :meth:`HiddenStates.ensure` when its first sample arrives."""
    return HiddenStates(Location.of(settings.storage), f"{settings.deployment}/hidden_states.lance")


class HiddenStates:
    """A :class:`~tide_platform.store.feature_store.FeatureStore` on Lance. One thread at a time uses its
    handle.
    """

    def __init__(self, location: Location, name: str):
        self.uri = location.uri(name)
        self._folder = None if location.bucket else Path(self.uri)
        self._options = location.lance_options()
        self._session = lance.Session(  # pyright: ignore[reportPrivateImportUsage]
            metadata_cache_size_bytes=_METADATA_CACHE, index_cache_size_bytes=_INDEX_CACHE
        )
        self._dataset: lance.LanceDataset | None = None
        self._lock = threading.Lock()

    def ensure(self, stream: StreamMeta) -> None:
        """Makes the dataset where there is none. Raises :class:`StreamMismatch` where it holds another
        stream.
        """
        dataset = self._latest()
        if dataset is None:
            schema = columns.dataset_schema(stream)
            try:
                lance.write_dataset(
                    schema.empty_table(),
                    self.uri,
                    schema=schema,
                    mode="create",
                    enable_stable_row_ids=True,
                    storage_options=self._options,
                    session=self._session,
                )
            except OSError as error:
                if "already exists" not in str(error):  # another process was faster
                    raise self._unavailable(error) from error
            dataset = self._require()
        ours = columns.stream_of(dataset.schema)
        if ours != stream:
            raise StreamMismatch(self.uri, ours, stream)

    def tip(self) -> Tip:
        """Version and live rows; two reads however large the dataset is, also where there is none yet."""
        dataset = self._latest()
        return Tip(0, 0) if dataset is None else Tip(dataset.version, dataset.count_rows())

    def stream_meta(self) -> StreamMeta:
        return columns.stream_of(self._require().schema)

    def append(self, samples: Sequence[Sample], segment_ids: Sequence[str]) -> Tip:
        """One commit of all samples, with the segments' ids in it, read back before it returns.

        A fragment holds one tenant and one day (UTC), so that expiry can drop whole fragments. After an
        exception it is unknown whether the commit took place: ask :meth:`committed_segments`.
        """
        dataset = self._require()
        stream = columns.stream_of(dataset.schema)
        groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        for sample in samples:
            _check(self.uri, stream, sample)
            day = datetime.fromtimestamp(sample.meta.captured_at, UTC).date().isoformat()
            groups[sample.meta.tenant, day].append(sample)
        try:
            fragments = []
            for _, group in sorted(groups.items()):
                table = columns.to_table(group, columns.dataset_schema(stream))
                fragments += write_fragments(
                    table, dataset, mode="append", storage_options=self._options, session=self._session
                )
            transaction = Transaction(
                dataset.version,
                LanceOperation.Append(fragments),
                transaction_properties={SEGMENTS_KEY: json.dumps(list(segment_ids))},
            )
            dataset = lance.LanceDataset.commit(dataset, transaction, storage_options=self._options)
            if set(segment_ids) - _segments(dataset.read_transaction(dataset.version)):
                raise StoreUnavailable(self.uri, f"version {dataset.version} is not the commit that was made")
        except (OSError, ValueError, RuntimeError) as error:
            self._forget()
            raise self._unavailable(error) from error
        if self._folder:  # Lance itself syncs nothing; the segments are deleted after this
            sync_new_files(self._folder)
        with self._lock:
            self._dataset = dataset
        return Tip(dataset.version, dataset.count_rows())

    def committed_segments(self, transactions: int = 32) -> set[str]:
        """Ids of the segments in the newest transactions.

        A committer deletes the segments of a commit before it makes the next one, so what it finds
        undeleted can only be in its last commit; 32 leaves room for maintenance in between.
        """
        dataset = self._latest(fresh=True)
        if dataset is None:
            return set()
        try:
            recent = dataset.get_transactions(transactions)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unavailable(error) from error
        return set().union(*(_segments(transaction) for transaction in recent))

    def refs(self, version: int | None = None, where: str | None = None) -> list[SampleRef]:
        """Metadata of the samples, oldest first, no tensors; empty where there is no dataset.

        ``where`` is SQL over the plain columns, also ``_row_created_at_version > V``.
        """
        dataset = self._at(version)
        if dataset is None:
            return []
        table = self._read(dataset, list(columns.META), where)
        rows = sorted(table.to_pylist(), key=lambda row: row["_rowid"])
        return [_ref(row) for row in rows]

    def sample_ids(self, since: float = 0.0) -> set[str]:
        """Ids of the samples captured at or after ``since`` (Unix time)."""
        dataset = self._latest(fresh=True)
        if dataset is None:
            return set()
        return set(self._read(dataset, ["sample_id"], f"captured_at >= {since}")["sample_id"].to_pylist())

    def load(
        self, wanted: Sequence[SampleRef] | Sequence[str], version: int | None = None, batch: int = 16
    ) -> Iterator[Sample]:
        """Whole samples in the order asked for, ``batch`` of them read at a time, each blob's crc32c
        verified.

        ``wanted``: references or sample ids. Raises :class:`SamplesMissing`, :class:`BlobCorrupt`.
        """
        if not wanted:
            return
        dataset = self._at(version)
        if dataset is None:
            raise NoDataset(self.uri)
        pairs = self._resolve(dataset, wanted)
        for start in range(0, len(pairs), batch):
            yield from self._batch(dataset, pairs[start : start + batch])

    # FeatureStore
    def put(self, samples: Sequence[Sample], batch_id: str) -> int:
        self.append(samples, [batch_id])
        return len(samples)

    def get(self, refs: Sequence[SampleRef]) -> Iterator[Sample]:
        return self.load(refs)

    def release(self, refs: Sequence[SampleRef]) -> None:
        """Nothing to free: expiry, not consumption, removes rows."""

    def abort(self, batch_id: str) -> None:
        """Nothing to undo: rows are not seen before their commit, and a commit is whole."""

    def health(self) -> Health:
        try:
            tip = self.tip()
        except StoreError as error:
            return Health(False, str(error))
        return Health(True, f"version {tip.version}, {tip.rows} samples")

    def _batch(self, dataset: lance.LanceDataset, pairs: list[tuple[str, int]]) -> Iterator[Sample]:
        stream, row_ids = columns.stream_of(dataset.schema), [row_id for _, row_id in pairs]
        plain = [*columns.META, *columns.LISTS]
        plain += [f"{name}_{suffix}" for name in columns.BLOBS for suffix in ("bytes", "crc32c")]
        try:
            table = dataset._take_rows(row_ids, columns=plain)
            if table.num_rows != len(pairs):  # rows that expired since are left out silently
                kept = set(table["sample_id"].to_pylist())
                raise SamplesMissing(self.uri, [sample_id for sample_id, _ in pairs if sample_id not in kept])
            blobs = {
                name: [value for _, value in dataset.read_blobs(name, ids=row_ids, preserve_order=True)]
                for name in columns.BLOBS
            }
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unavailable(error) from error
        lists = {name: table[name].combine_chunks() for name in columns.LISTS}
        for index, row in enumerate(table.drop_columns(list(columns.LISTS)).to_pylist()):
            if row["sample_id"] != pairs[index][0]:
                raise SamplesMissing(self.uri, [pairs[index][0]])
            tensors = {
                name: lists[name][index].values.to_numpy(zero_copy_only=False) for name in columns.LISTS
            }
            for name in columns.BLOBS:
                rows = len(tensors["row_pos" if name == "aux" else "teacher_pos"])
                shape = columns.blob_shape(name, stream, rows)
                tensors[name] = self._tensor(row, name, blobs[name][index], shape)
            yield Sample(columns.to_meta(row), tensors)

    def _tensor(
        self, row: dict[str, Any], name: str, blob: bytes | None, shape: tuple[int, int]
    ) -> np.ndarray:
        array = np.frombuffer(blob or b"", TENSORS[name][0])
        whole = array.nbytes == row[f"{name}_bytes"] and crc32c(array) == row[f"{name}_crc32c"]
        if not whole or array.size != shape[0] * shape[1]:
            raise BlobCorrupt(self.uri, row["sample_id"], name)
        return array.reshape(shape)

    def _resolve(
        self, dataset: lance.LanceDataset, wanted: Sequence[SampleRef] | Sequence[str]
    ) -> list[tuple[str, int]]:
        """Pairs (sample id, row id), in order."""
        known = {item.sample_id: item.row_id for item in wanted if isinstance(item, SampleRef)}
        unknown = [item for item in wanted if isinstance(item, str)]
        for start in range(0, len(unknown), _IDS_A_QUERY):
            quoted = ", ".join(
                "'{}'".format(item.replace("'", "''")) for item in unknown[start : start + _IDS_A_QUERY]
            )
            table = self._read(dataset, ["sample_id"], f"sample_id IN ({quoted})")
            known |= dict(zip(table["sample_id"].to_pylist(), table["_rowid"].to_pylist(), strict=True))
        ids = [item.sample_id if isinstance(item, SampleRef) else item for item in wanted]
        if missing := [item for item in ids if item not in known]:
            raise SamplesMissing(self.uri, missing)
        return [(item, known[item]) for item in ids]

    def _read(self, dataset: lance.LanceDataset, names: list[str], where: str | None) -> Any:
        try:
            return dataset.scanner(columns=names, filter=where, with_row_id=True).to_table()
        except (OSError, RuntimeError) as error:
            raise self._unavailable(error) from error

    def _at(self, version: int | None) -> lance.LanceDataset | None:
        dataset = self._latest()
        if dataset is None or version is None:
            return dataset
        try:
            return dataset.checkout_version(version)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.uri}: no version {version}: it was cleaned up or never was") from error

    def _require(self) -> lance.LanceDataset:
        dataset = self._latest()
        if dataset is None:
            raise NoDataset(self.uri)
        return dataset

    def _latest(self, fresh: bool = False) -> lance.LanceDataset | None:
        with self._lock:
            try:
                if self._dataset is None or fresh:
                    self._dataset = lance.dataset(
                        self.uri, storage_options=self._options, session=self._session
                    )
                else:
                    self._dataset.checkout_latest()
            except ValueError as error:
                self._dataset = None
                if "was not found" not in str(error):
                    raise self._unavailable(error) from error
            except (OSError, RuntimeError) as error:
                self._dataset = None
                raise self._unavailable(error) from error
            return self._dataset

    def _forget(self) -> None:
        with self._lock:
            self._dataset = None

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(self.uri, " ".join(str(error).split())[:300])


def _segments(transaction: Transaction | None) -> set[str]:
    properties = (transaction.transaction_properties if transaction else None) or {}
    return set(json.loads(properties.get(SEGMENTS_KEY, "[]")))


def _ref(row: dict[str, Any]) -> SampleRef:
    return SampleRef(**(columns.to_meta(row).__dict__ | {"row_id": row["_rowid"]}))


def _check(uri: str, stream: StreamMeta, sample: Sample) -> None:
    """A sample's widths and target are its dataset's, else its bytes could never be read back."""
    width, k = sample.tensors["aux"].shape[1], sample.tensors["teacher_ids"].shape[1]
    digest = sample.meta.target_digest
    if (width, k, digest) != (3 * stream.hidden_size, stream.teacher_k, stream.target_digest):
        raise StreamMismatch(
            uri, stream, StreamMeta(digest, width // 3, stream.vocab_size, stream.aux_layer_ids, k)
        )
