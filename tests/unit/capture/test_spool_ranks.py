"""One spool for the rings of a server's data-parallel ranks."""

import json
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_spool import Process, stored, until

from tests.synthetic import STREAM, assert_same, begin, make_sample, send, write_rows
from tide_platform.capture.record import StreamMeta
from tide_platform.capture.ring import Ring, leave_ranks_from, left_paths, rank_path, rank_paths
from tide_platform.capture.spool import Spool, SpoolSettings
from tide_platform.capture.writer import RingWriter


def rings(folder: Path, ranks: int, stream: StreamMeta = STREAM) -> list[Ring]:
    """Of a server that starts with so many ranks, in any order of theirs."""
    leave_ranks_from(folder / "ring", ranks)
    return [Ring.create(rank_path(folder / "ring", rank), 1 << 20, stream) for rank in range(ranks)]


def drained(spool: Spool, *these: Ring) -> None:
    spool.step()
    while any(ring.tail != ring.head for ring in these):
        spool.step()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_samples_of_all_ranks_are_stored_whole(tmp_path_factory, order: list[int]):
    folder = tmp_path_factory.mktemp("spool")
    made = rings(folder, 4)
    writers, spool = (
        [RingWriter(ring) for ring in made],
        Spool(folder / "ring", folder / "spool", SpoolSettings()),
    )
    wanted = {}
    for number, rank in enumerate(order):
        wanted[str(number)] = make_sample(str(number), seed=number)
        assert send(writers[rank], wanted[str(number)])
        if number % 3 == 0:
            spool.step()
    drained(spool, *made)
    spool.close()
    found = {sample.meta.sample_id: sample for sample in stored(folder)}
    assert found.keys() == wanted.keys()
    for name, sample in wanted.items():
        assert_same(found[name], sample)
    assert json.loads((folder / "spool" / "spool.json").read_text())["dropped"] == {}


def test_what_each_rank_lost_is_added_up(tmp_path):
    made = rings(tmp_path, 2)
    spool = Spool(tmp_path / "ring", tmp_path / "spool", SpoolSettings())
    for rank, ring in enumerate(made):
        writer = RingWriter(ring)
        begin(writer, make_sample(f"gone-{rank}"))
        writer.discard(f"r-gone-{rank}", "aborted")
        assert send(writer, make_sample(f"kept-{rank}", seed=rank))
    drained(spool, *made)
    spool.close()
    status = json.loads((tmp_path / "spool" / "spool.json").read_text())
    assert status["ring_dropped"] == {"aborted": 2} and status["samples"] == 2


def test_a_rank_that_is_no_more_is_drained_and_counted(tmp_path):
    spool = Spool(tmp_path / "ring", tmp_path / "spool", SpoolSettings())
    first = rings(tmp_path, 3)
    drained(spool, *first)
    writer = RingWriter(first[2])
    assert send(writer, make_sample("last words"))
    begin(writer, make_sample("cut-off", seed=3))
    write_rows(writer, make_sample("cut-off", seed=3), 0, 6)
    second = rings(tmp_path, 1)
    assert rank_paths(tmp_path / "ring") == [rank_path(tmp_path / "ring", rank) for rank in range(3)]
    assert send(RingWriter(second[0]), make_sample("of the next server", seed=4))
    until(lambda: spool.step() is False and not left_paths(rank_path(tmp_path / "ring", 2)))
    until(lambda: spool.step() is False and second[0].tail == second[0].head)
    spool.close()
    assert {s.meta.sample_id for s in stored(tmp_path)} == {"last words", "of the next server"}
    status = json.loads((tmp_path / "spool" / "spool.json").read_text())
    assert status["dropped"] == {"server_gone": 1}
    assert [path.name for path in sorted(tmp_path.glob("ring*"))] == ["ring"]


def test_ranks_that_were_left_while_no_spool_ran_are_found(tmp_path):
    made = rings(tmp_path, 2)
    for rank, ring in enumerate(made):
        assert send(RingWriter(ring), make_sample(str(rank), seed=rank))
    rings(tmp_path, 1)
    spool = Spool(tmp_path / "ring", tmp_path / "spool", SpoolSettings())
    spool.step()
    spool.close()
    assert {s.meta.sample_id for s in stored(tmp_path)} == {"0", "1"}


def test_another_target_on_one_rank_gets_segments_of_its_own(tmp_path):
    """A restart: one rank's ring is replaced before the other's."""
    other = StreamMeta(**(STREAM.to_json() | {"target_digest": "another"}))
    made = [*rings(tmp_path, 1), Ring.create(rank_path(tmp_path / "ring", 1), 1 << 20, other)]
    writers = [RingWriter(ring) for ring in made]
    spool = Spool(tmp_path / "ring", tmp_path / "spool", SpoolSettings())
    for number in range(6):
        assert send(writers[number % 2], make_sample(str(number), seed=number))
        drained(spool, *made)
    spool.close()
    assert len(stored(tmp_path)) == 6 and len(list((tmp_path / "spool").glob("*.seg"))) == 6


@pytest.mark.parametrize("killed_with", [1, 2])
def test_after_a_kill_the_losses_of_every_rank_are_counted(tmp_path, killed_with: int):
    made = rings(tmp_path, 2)
    writers = [RingWriter(ring) for ring in made]
    process = Process(str(tmp_path / "spool"), str(tmp_path / "ring"))
    for rank in range(killed_with):
        begin(writers[rank], make_sample(f"open-{rank}", seed=rank))
        write_rows(writers[rank], make_sample(f"open-{rank}", seed=rank), 0, 6)
    until(lambda: all(ring.tail == ring.head for ring in made))
    process.end(signal.SIGKILL)
    assert send(writers[1], make_sample("meanwhile", seed=9))
    process = Process(str(tmp_path / "spool"), str(tmp_path / "ring"))
    until(lambda: stored(tmp_path))
    made = rings(tmp_path, 2)  # the server restarts: what was open never ends
    until(lambda: not any(left_paths(rank_path(tmp_path / "ring", rank)) for rank in range(2)))
    code, _ = process.end()
    status = json.loads((tmp_path / "spool" / "spool.json").read_text())
    assert code == 0 and status["dropped"] == {"spool_restarted": killed_with}
