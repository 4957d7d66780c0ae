"""Segments: what was written is read back, anything else is noticed."""

import errno
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synthetic import STREAM, assert_same, make_sample
from tide_platform.capture.segment import CorruptSegment, SegmentWriter, read_segment, recover_segment

SAMPLES = [make_sample(str(number), 5 + number, seed=number, flags=("grammar",)) for number in range(4)]


def written(folder, samples=SAMPLES):
    segment = SegmentWriter(folder, STREAM)
    for sample in samples:
        segment.append(sample)
    return segment


def test_round_trip(tmp_path):
    path = written(tmp_path).seal()
    assert path.suffix == ".seg" and [path] == list(tmp_path.iterdir())
    stream, samples = read_segment(path)
    assert stream == STREAM
    for found, wanted in zip(samples, SAMPLES, strict=True):
        assert_same(found, wanted)


def test_names_sort_by_time(tmp_path):
    paths = [written(tmp_path, SAMPLES[:1]).seal() for _ in range(5)]
    assert sorted(tmp_path.iterdir()) == paths


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_flipped_bit_or_cut_is_noticed(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("segment")).seal()
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path.write_bytes(content)
    with pytest.raises(CorruptSegment, match=path.name):
        read_segment(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_recovery_keeps_whole_samples_and_cuts_the_tail(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("segment")
    segment, ends = SegmentWriter(folder, STREAM), []
    for sample in SAMPLES:
        segment.append(sample)
        ends.append(segment.bytes)
    path = segment.seal()
    path = path.rename(path.with_suffix(".open"))
    content = path.read_bytes()[: ends[-1]]
    at = data.draw(st.integers(0, len(content)))
    reserved = bytes(data.draw(st.sampled_from([0, 5000])))
    path.write_bytes(content[:at] + reserved)
    whole = sum(end <= at for end in ends)
    found = recover_segment(path)
    assert found.samples == whole
    assert not list(folder.glob("*.open"))
    if whole:
        _, samples = read_segment(found.path)
        assert [sample.meta.sample_id for sample in samples] == [str(number) for number in range(whole)]
        assert found.cut_bytes == len(content[ends[whole - 1] : at].rstrip(b"\0"))
    else:
        assert found.path is None and not list(folder.iterdir())


def test_recovery_of_one_that_was_complete_but_not_renamed(tmp_path):
    path = written(tmp_path).seal()
    path = path.rename(path.with_suffix(".open"))
    found = recover_segment(path)
    assert (found.samples, found.cut_bytes) == (len(SAMPLES), 0)
    assert len(read_segment(found.path)[1]) == len(SAMPLES)


def test_a_failed_append_leaves_the_segment_as_it_was(tmp_path, monkeypatch):
    segment = written(tmp_path, SAMPLES[:2])
    large = make_sample("large", 40_000)  # beyond what was reserved

    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "posix_fallocate", full)
        segment.append(large)
    segment.append(SAMPLES[3])
    assert [sample.meta.sample_id for sample in read_segment(segment.seal())[1]] == ["0", "1", "3"]
