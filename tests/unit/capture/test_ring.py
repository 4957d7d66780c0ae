"""The ring: never blocks, never tears a sample, survives its reader."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synthetic import STREAM, assert_same, make_sample, send, write_rows
from tide_platform.capture.assemble import Assembler
from tide_platform.capture.reader import RingReader
from tide_platform.capture.ring import Ring, RingUnusable, RingWriter

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


def test_interleaved_requests_do_not_mix(ring):
    writer = RingWriter(ring)
    wanted = [make_sample(str(number), 12, seed=number) for number in range(5)]
    for first in range(0, 12, 3):
        for sample in wanted:
            write_rows(writer, sample, first, first + 3)
    for sample in wanted:
        writer.finish(sample.meta.request_id, sample.meta, sample.tensors["input_ids"])
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
    assert write_rows(writer, victim, 0, 10)
    while write_rows(writer, filler, 0, 30):
        pass
    assert not write_rows(writer, victim, 10, 30)
    drain(reader, assembler)
    assert not write_rows(writer, victim, 10, 30), "dropped once, dropped until its end"
    assert not writer.finish(victim.meta.request_id, victim.meta, victim.tensors["input_ids"])
    assert drain(reader, assembler) == [] and not assembler._requests
    assert writer.dropped == {"ring_full": 2}


def test_a_request_id_may_come_again_after_its_drop(ring):
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(STREAM, 4096)
    sample = make_sample("again", 9)
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
    assert not write_rows(writer, type(sample)(sample.meta, narrow), 0, 3)
    assert writer.dropped == {"malformed": 1}


def test_a_write_larger_than_a_piece_is_split(ring):
    writer, sample = RingWriter(ring), make_sample("long", 200)
    assert write_rows(writer, sample, 0, 200)
    assert writer.finish(sample.meta.request_id, sample.meta, sample.tensors["input_ids"])
    (found,) = drain(RingReader(ring), Assembler(STREAM, 4096))
    assert_same(found, sample)


def test_a_write_larger_than_the_ring_is_dropped(ring):
    writer, sample = RingWriter(ring), make_sample("huge", 2000)
    assert not write_rows(writer, sample, 0, 2000)
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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 25), st.sampled_from("wwwwfdr")), max_size=120))
def test_any_interleaving_yields_only_whole_samples(tmp_path_factory, steps):
    """w: rows, f: finish, d: discard, r: the reader takes some records. Full rings happen on the way."""
    ring = Ring.create(tmp_path_factory.mktemp("ring") / "ring", BYTES, STREAM)
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(STREAM, 4096)
    progress: dict[int, int] = {}
    generation: dict[int, int] = {}
    sent: dict[str, object] = {}
    found = []

    def current(who: int):
        return make_sample(f"{who}-{generation.get(who, 0)}", 400, seed=who, request_id=f"rid{who}")

    for who, amount, action in steps:
        sample, at = current(who), progress.get(who, 0)
        if action == "w":
            write_rows(writer, sample, at, min(400, at + amount * 4))
            progress[who] = min(400, at + amount * 4)
        elif action == "r":
            found += drain(reader, assembler, amount)
        else:
            if action == "f" and at:
                ids = sample.tensors["input_ids"][:at]
                if writer.finish(f"rid{who}", sample.meta, ids):
                    sent[sample.meta.sample_id] = (sample, at)
            else:
                writer.discard(f"rid{who}", "aborted")
            progress[who], generation[who] = 0, generation.get(who, 0) + 1
    found += drain(reader, assembler)
    assert [sample.meta.sample_id for sample in found] == list(sent)
    for sample in found:
        wanted, at = sent[sample.meta.sample_id]
        np.testing.assert_array_equal(sample.tensors["row_pos"], np.arange(at))
        np.testing.assert_array_equal(sample.tensors["aux"], wanted.tensors["aux"][:at])
    assert assembler.dropped == {}
