"""Streams with last hidden states: from the ring to the segment, whole and in stretches."""

from dataclasses import replace

import numpy as np
import pytest

from tests.synthetic import LAST_STREAM, STREAM, assert_same, begin, finish, make_sample, send, write_rows
from tide_platform.capture.assemble import Assembler
from tide_platform.capture.packing import pack, unpack
from tide_platform.capture.reader import RingReader
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.ring import Ring
from tide_platform.capture.segment import SegmentWriter, read_segment
from tide_platform.capture.writer import RingWriter


def drained(reader: RingReader, assembler: Assembler) -> list[Sample]:
    samples = []
    while record := reader.peek():
        samples += assembler.take(record)
        reader.advance(record)
    return samples


@pytest.mark.parametrize("stream", [STREAM, LAST_STREAM])
@pytest.mark.parametrize("ring_bytes", [1 << 16, 1 << 20])  # the small one splits a write into pieces
def test_from_ring_to_segment(tmp_path, stream, ring_bytes):
    ring = Ring.create(tmp_path / "ring", ring_bytes, stream)
    assert ring.stream == stream
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(stream, 4096)
    wanted = [make_sample("a", 40, 1, stream), make_sample("b", 300, 2, stream)]
    found = []
    for sample in wanted:
        assert send(writer, sample, step=120)
        found += drained(reader, assembler)
    segment = SegmentWriter(tmp_path, stream)
    for sample in found:
        segment.append(sample)
    read_stream, read = read_segment(segment.seal())
    assert read_stream == stream and len(read) == 2
    for one, sample in zip(read, wanted, strict=True):
        assert set(one.tensors) == set(stream.tensors)
        assert_same(one, sample)


def test_stretches_share_the_rows_out(tmp_path):
    ring = Ring.create(tmp_path / "ring", 1 << 20, LAST_STREAM)
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(LAST_STREAM, 16)
    sample = make_sample("a", 40, 3, LAST_STREAM)
    begin(writer, sample)
    for first in range(5, 40, 7):  # the first five rows are a hole
        assert write_rows(writer, sample, first, min(first + 7, 40))
    assert finish(writer, sample)
    parts = drained(reader, assembler)
    assert [part.meta.num_tokens for part in parts] == [16, 16, 8]
    rows = np.concatenate([part.tensors["last_hidden"] for part in parts])
    np.testing.assert_array_equal(rows, sample.tensors["last_hidden"][5:])


@pytest.mark.parametrize("stream", [STREAM, LAST_STREAM])
def test_a_write_that_is_not_the_streams_is_malformed(tmp_path, stream):
    writer = RingWriter(Ring.create(tmp_path / "ring", 1 << 20, stream))
    other = make_sample("a", 6, 1, LAST_STREAM if stream is STREAM else STREAM)
    begin(writer, other)
    assert not write_rows(writer, other, 0, 6)
    assert writer.dropped == {"malformed": 1}


def test_packed_samples_keep_them():
    sample = make_sample("a", 12, 1, LAST_STREAM)
    packed = pack(sample, "int4")
    np.testing.assert_array_equal(packed.tensors["last_hidden"], sample.tensors["last_hidden"])
    assert set(unpack(packed, 24).tensors) == set(LAST_STREAM.tensors)


def test_a_sample_with_other_rows_than_its_teachers_is_refused():
    sample = make_sample("a", 12, 1, LAST_STREAM)
    tensors = sample.tensors | {"last_hidden": sample.tensors["last_hidden"][1:]}
    with pytest.raises(ValueError, match="last_hidden: 11 rows for 12 teacher rows"):
        Sample(sample.meta, tensors)


def test_a_stream_of_a_former_release_has_the_top_k():
    raw = STREAM.to_json()
    del raw["target_signal"]
    assert StreamMeta.from_json(raw) == STREAM
    assert replace(STREAM, target_signal="last_hidden") == LAST_STREAM and LAST_STREAM.last_width == 8
