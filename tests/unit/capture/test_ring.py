"""The ring: never blocks, never tears a sample, survives its reader."""

from dataclasses import replace

import numpy as np
import pytest

from tests.synthetic import LAST_STREAM, STREAM, assert_same, begin, finish, make_sample, send, write_rows
from tide_platform.capture.assemble import Assembler
from tide_platform.capture.reader import RingReader
from tide_platform.capture.ring import Ring, RingUnusable
from tide_platform.capture.writer import RingWriter

BYTES = 1 << 16


def drain(reader: RingReader, assembler: Assembler, records: int = 10**9) -> list:
    samples = []
    while records and (record := reader.peek()):
        samples += assembler.take(record)
        reader.advance(record)
        records -= 1
    return samples


@pytest.fixture
def ring(tmp_path):
    return Ring.create(tmp_path / "ring", BYTES, STREAM)


def test_a_sample_comes_out_as_it_went_in(ring):
    writer, wanted = RingWriter(ring), make_sample("a", 20)
    assert send(writer, wanted)
    (found,) = drain(RingReader(Ring.open(ring.path)), Assembler(STREAM, 4096))
    assert_same(found, wanted)
    assert writer.dropped == {} and (writer.samples, writer.rows) == (1, 20)


def test_rows_that_do_not_lie_together_are_written_as_they_read(tmp_path):
    ring = Ring.create(tmp_path / "last", BYTES, LAST_STREAM)
    writer, wanted = RingWriter(ring), make_sample("a", 20, stream=LAST_STREAM)
    spread = {name: np.repeat(array, 2, -1)[..., ::2] for name, array in wanted.tensors.items()}
    assert not spread["aux"].flags.c_contiguous and not spread["last_hidden"].flags.c_contiguous
    assert send(writer, replace(wanted, tensors=spread))
    (found,) = drain(RingReader(ring), Assembler(LAST_STREAM, 4096))
    assert_same(found, wanted)


def test_interleaved_requests_do_not_mix(ring):
    writer = RingWriter(ring)
    wanted = [make_sample(str(number), 12, seed=number) for number in range(5)]
    for sample in wanted:
        begin(writer, sample)
    for first in range(0, 12, 3):
        for sample in wanted:
            write_rows(writer, sample, first, first + 3)
    for sample in wanted:
        finish(writer, sample)
    for found, sample in zip(drain(RingReader(ring), Assembler(STREAM, 4096)), wanted, strict=True):
        assert_same(found, sample)


def test_a_full_ring_drops_the_whole_sample_and_never_raises(ring):
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(STREAM, 4096)
    samples = [make_sample(str(number), 60, seed=number) for number in range(40)]
    kept = [sample for sample in samples if send(writer, sample)]
    assert 0 < len(kept) < len(samples)
    assert writer.dropped == {"ring_full": len(samples) - len(kept)}
    for found, sample in zip(drain(reader, assembler), kept, strict=True):
        assert_same(found, sample)
    assert assembler.dropped == {} and not assembler._requests
    assert send(writer, make_sample("later", 60)) and len(drain(reader, assembler)) == 1


def test_rows_that_are_in_the_ring_when_it_fills_up_are_discarded(ring):
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(STREAM, 4096)
    victim, filler = make_sample("victim", 30), make_sample("filler", 30, seed=1)
    begin(writer, filler)
    assert begin(writer, victim) and write_rows(writer, victim, 0, 10)
    while write_rows(writer, filler, 0, 30):
        pass
    assert not write_rows(writer, victim, 0, 30)
    drain(reader, assembler)
    assert not write_rows(writer, victim, 0, 30), "dropped once, dropped until its end"
    assert not finish(writer, victim)
    assert drain(reader, assembler) == [] and not assembler._requests
    assert writer.dropped == {"ring_full": 2}


def test_a_request_id_may_come_again_after_its_drop(ring):
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(STREAM, 4096)
    sample = make_sample("again", 9)
    begin(writer, sample)
    write_rows(writer, sample, 0, 6)
    writer.discard(sample.meta.request_id, "aborted")
    writer.discard("never-seen", "opt_out")
    assert send(writer, sample)
    (found,) = drain(reader, assembler)
    assert_same(found, sample)
    assert writer.dropped == {"aborted": 1, "opt_out": 1}


def test_malformed_rows_drop_the_sample(ring):
    writer, sample = RingWriter(ring), make_sample("bad", 9)
    narrow = {**sample.tensors, "aux": sample.tensors["aux"][:, 1:]}
    begin(writer, sample)
    assert not write_rows(writer, type(sample)(sample.meta, narrow), 0, 3)
    assert not write_rows(writer, make_sample("unknown"), 0, 3), "it never began"
    assert writer.dropped == {"malformed": 2}


def test_tokens_that_are_not_contiguous_drop_the_sample(ring):
    writer, sample = RingWriter(ring), make_sample("gap", 9)
    begin(writer, sample)
    assert write_rows(writer, sample, 0, 3, confirmed=True)
    assert not write_rows(writer, sample, 4, 6, confirmed=True)
    assert writer.dropped == ring.lost() == {"malformed": 1}


def test_a_write_larger_than_a_piece_is_split(ring):
    writer, sample = RingWriter(ring), make_sample("long", 200)
    begin(writer, sample)
    assert write_rows(writer, sample, 0, 200) and finish(writer, sample)
    (found,) = drain(RingReader(ring), Assembler(STREAM, 4096))
    assert_same(found, sample)


def test_a_write_larger_than_the_ring_is_dropped(ring):
    writer, sample = RingWriter(ring), make_sample("huge", 2000)
    assert begin(writer, sample) and not write_rows(writer, sample, 0, 2000)
    assert writer.dropped == {"ring_full": 1}


def test_unread_records_of_a_former_ring_are_set_aside(ring, tmp_path):
    send(RingWriter(ring), make_sample("old"))
    new = Ring.create(ring.path, BYTES, STREAM)
    (left,) = tmp_path.glob("ring.left-*")
    assert len(drain(RingReader(Ring.open(left)), Assembler(STREAM, 4096))) == 1
    assert new.head == new.tail == 0


def test_heartbeat(ring):
    assert ring.spool_age() == float("inf")
    Ring.open(ring.path).beat()
    assert 0 <= ring.spool_age() < 5


def test_no_ring_and_garbage_are_named(tmp_path):
    with pytest.raises(RingUnusable, match="no ring there"):
        Ring.open(tmp_path / "none")
    (tmp_path / "junk").write_bytes(b"x" * (1 << 17))
    with pytest.raises(RingUnusable, match="not a ring"):
        Ring.open(tmp_path / "junk")
