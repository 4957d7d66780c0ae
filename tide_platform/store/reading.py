"""Rows of the dataset as samples: blobs fetched, checksums verified, aux states unpacked."""

from collections.abc import Iterator, Sequence
from typing import Any

import lance
import numpy as np

from tide_platform.capture.packing import PackedCorrupt, unpack
from tide_platform.capture.record import Sample
from tide_platform.capture.segment import crc32c
from tide_platform.store import schema as columns
from tide_platform.store.errors import BlobCorrupt, SamplesMissing, StoreUnavailable
from tide_platform.store.feature_store import SampleRef
from tide_platform.store.handle import Handle

# what Lance says of a blob file that is short or missing
_TORN = ("fill whole buffer", "bytes, expected", "Invalid range", "Range Not Satisfiable", "Not found")
_IDS_A_QUERY = 500
_PLAIN = [*columns.META, *columns.LISTS]


def read(handle: Handle, dataset: lance.LanceDataset, names: list[str], where: str | None) -> Any:
    """An Arrow table of plain columns and ``_rowid``."""
    with handle.errors():
        return dataset.scanner(columns=names, filter=where, with_row_id=True).to_table()


def resolve(
    handle: Handle, dataset: lance.LanceDataset, wanted: Sequence[SampleRef] | Sequence[str]
) -> list[tuple[str, int]]:
    """Pairs (sample id, row id), in order. Raises :class:`SamplesMissing`."""
    known = {item.sample_id: item.row_id for item in wanted if isinstance(item, SampleRef)}
    unknown = [item for item in wanted if isinstance(item, str)]
    for start in range(0, len(unknown), _IDS_A_QUERY):
        part = unknown[start : start + _IDS_A_QUERY]
        table = read(handle, dataset, ["sample_id"], f"sample_id IN ({quoted(part)})")
        known |= dict(zip(table["sample_id"].to_pylist(), table["_rowid"].to_pylist(), strict=True))
    ids = [item.sample_id if isinstance(item, SampleRef) else item for item in wanted]
    if missing := [item for item in ids if item not in known]:
        raise SamplesMissing(handle.uri, missing)
    return [(item, known[item]) for item in ids]


def load_batch(
    handle: Handle, dataset: lance.LanceDataset, pairs: list[tuple[str, int]], packed: bool = False
) -> Iterator[Sample]:
    """Whole samples of (sample id, row id), in order; ``packed``: aux states as they are stored.

    Raises :class:`SamplesMissing`, :class:`BlobCorrupt`.
    """
    row_ids = [row_id for _, row_id in pairs]
    stream = columns.stream_of(dataset.schema)
    large = columns.blobs(stream)
    plain = [*_PLAIN, *(f"{name}_{suffix}" for name in large for suffix in ("bytes", "crc32c"))]
    with handle.errors():
        table = dataset._take_rows(row_ids, columns=plain)
        if table.num_rows != len(pairs):  # rows that expired since are left out silently
            kept = set(table["sample_id"].to_pylist())
            raise SamplesMissing(handle.uri, [sample_id for sample_id, _ in pairs if sample_id not in kept])
    blobs = {name: _blobs(handle, dataset, name, pairs) for name in large}
    lists = {name: table[name].combine_chunks() for name in columns.LISTS}
    for index, row in enumerate(table.drop_columns(list(columns.LISTS)).to_pylist()):
        if row["sample_id"] != pairs[index][0]:
            raise SamplesMissing(handle.uri, [pairs[index][0]])
        tensors = {name: lists[name][index].values.to_numpy(zero_copy_only=False) for name in columns.LISTS}
        rows, teachers = len(tensors["row_pos"]), len(tensors["teacher_pos"])
        for name in large:
            blob = blobs[name][index] or b""
            whole = len(blob) == row[f"{name}_bytes"]
            whole = whole and crc32c(np.frombuffer(blob, np.uint8)) == row[f"{name}_crc32c"]
            array = columns.blob_array(name, blob, row["aux_format"], stream, rows, teachers)
            if not whole or array is None:
                raise BlobCorrupt(handle.uri, row["sample_id"], name)
            tensors[name] = array
        sample = Sample(columns.to_meta(row), tensors)
        if packed:
            yield sample
            continue
        try:
            yield unpack(sample, 3 * stream.hidden_size)
        except PackedCorrupt as error:
            raise BlobCorrupt(handle.uri, row["sample_id"], "aux") from error


def _blobs(
    handle: Handle, dataset: lance.LanceDataset, name: str, pairs: list[tuple[str, int]]
) -> list[bytes | None]:
    row_ids = [row_id for _, row_id in pairs]
    try:
        with handle.errors():
            return [value for _, value in dataset.read_blobs(name, ids=row_ids, preserve_order=True)]
    except StoreUnavailable as error:
        if not any(sign in error.what for sign in _TORN):
            raise
        if len(pairs) > 1:  # which one
            return [_blobs(handle, dataset, name, [pair])[0] for pair in pairs]
        raise BlobCorrupt(handle.uri, pairs[0][0], name) from error


def to_ref(row: dict[str, Any]) -> SampleRef:
    return SampleRef(**(columns.to_meta(row).__dict__ | {"row_id": row["_rowid"]}))


def quoted(values: Sequence[str]) -> str:
    """SQL string literals, comma separated."""
    return ", ".join("'{}'".format(value.replace("'", "''")) for value in values)
