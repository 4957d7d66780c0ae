"""The dataset's columns: one row a sample, one blob column a large tensor, the rest plain (design 4.2).

Shapes are not stored: H and K are the stream's, R and M the lengths of ``row_pos`` and ``teacher_pos``.
Packed aux states stay as the spool packed them (``aux_format``). Teacher ids take two bytes each where the
vocabulary allows it.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from tide_platform.capture.record import KINDS, OPTIONAL, TENSORS, Sample, SampleMeta, StreamMeta
from tide_platform.capture.segment import crc32c

STREAM_KEY = b"tide.stream"
BLOBS = ("aux", "teacher_ids", "teacher_logp")
LISTS = tuple(name for name in TENSORS if name not in BLOBS)
# a blob of this size is an object of its own, smaller ones share one a fragment: measured on SeaweedFS
# (docs/storage.md), reads are 1.6 times as fast as from one large pack, at the same speed of writing
_DEDICATED = 256 << 10
_BLOB = lance.blob.BlobType()
_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    tuple[str, ...]: pa.list_(pa.string()),
}
META: dict[str, pa.DataType] = {field.name: _TYPES[field.type] for field in fields(SampleMeta)}


def dataset_schema(stream: StreamMeta) -> pa.Schema:
    columns = [pa.field(name, kind) for name, kind in META.items()]
    columns += [pa.field(name, pa.list_(pa.from_numpy_dtype(np.dtype(TENSORS[name][0])))) for name in LISTS]
    for name in blobs(stream):
        columns.append(lance.blob_field(name, dedicated_size_threshold=_DEDICATED))
        columns += [pa.field(f"{name}_bytes", pa.int64()), pa.field(f"{name}_crc32c", pa.uint32())]
    return pa.schema(columns, metadata={STREAM_KEY: json.dumps(stream.to_json(), sort_keys=True)})


def blobs(stream: StreamMeta) -> tuple[str, ...]:
    """Names of the tensors that are a blob column each, in the order of the columns."""
    return (*BLOBS, *(name for name in OPTIONAL if name in stream.tensors))


def stream_of(schema: pa.Schema) -> StreamMeta:
    return StreamMeta.from_json(json.loads(schema.metadata[STREAM_KEY]))


def to_table(samples: Sequence[Sample], schema: pa.Schema) -> pa.Table:
    stream = stream_of(schema)
    metas = [sample.meta.to_json() for sample in samples]
    columns: dict[str, Any] = {
        name: pa.array([meta[name] for meta in metas], kind) for name, kind in META.items()
    }
    for name in LISTS:
        columns[name] = pa.array([sample.tensors[name] for sample in samples], schema.field(name).type)
    for name in blobs(stream):
        arrays = [np.ascontiguousarray(stored_array(name, sample, stream)) for sample in samples]
        columns[name] = _blob_column(arrays)
        columns[f"{name}_bytes"] = pa.array([array.nbytes for array in arrays], pa.int64())
        columns[f"{name}_crc32c"] = pa.array([crc32c(array) for array in arrays], pa.uint32())
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _blob_column(arrays: Sequence[np.ndarray]) -> pa.ExtensionArray:
    """As ``lance.blob_array`` of their bytes, with each copied once, into memory of the right size: a builder
    that grows touches three times as many fresh pages, which cost more than the copies.
    """
    ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
    content = pa.allocate_buffer(int(ends[-1]))
    there = np.frombuffer(content, np.uint8)
    for array, begin, end in zip(arrays, ends, ends[1:], strict=False):
        there[begin:end] = array.reshape(-1).view(np.uint8)
    data = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(arrays), [None, pa.py_buffer(ends), content]
    )
    fields = list(_BLOB.storage_type)
    others = [pa.nulls(len(arrays), field.type) for field in fields[1:]]  # where a blob lies elsewhere
    return pa.ExtensionArray.from_storage(_BLOB, pa.StructArray.from_arrays([data, *others], fields=fields))


def to_meta(row: dict[str, Any]) -> SampleMeta:
    """The metadata of a row read with the columns of :data:`META`."""
    return SampleMeta.from_json({name: row[name] for name in META})


def stored_array(name: str, sample: Sample, stream: StreamMeta) -> np.ndarray:
    """The tensor as it is stored."""
    array = sample.tensors[name]
    return array.astype(np.uint16) if name == "teacher_ids" and _narrow(stream) else array


def blob_array(
    name: str, blob: bytes, aux_format: str, stream: StreamMeta, rows: int, teachers: int
) -> np.ndarray | None:
    """The tensor of a stored blob, aux states still packed; None where its length is not the shape's."""
    if name == "aux" and aux_format != "bf16":
        return np.frombuffer(blob, np.uint8)  # its length is checked where it is unpacked
    shape = {
        "aux": (rows, 3 * stream.hidden_size),
        "last_hidden": (teachers, stream.hidden_size),
    }.get(name, (teachers, stream.teacher_k))
    kind = np.uint16 if name == "teacher_ids" and _narrow(stream) else np.dtype(KINDS[name][0])
    if len(blob) != shape[0] * shape[1] * np.dtype(kind).itemsize:
        return None
    return np.frombuffer(blob, kind).reshape(shape).astype(KINDS[name][0], copy=False)


def stored_bytes(sample: Sample) -> int:
    """Of its large tensors, at most."""
    return sum(sample.tensors[name].nbytes for name in (*BLOBS, *OPTIONAL) if name in sample.tensors)


def _narrow(stream: StreamMeta) -> bool:
    return stream.vocab_size <= 1 << 16
