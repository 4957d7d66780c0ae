"""Records to samples: what counts as whole, and what is cut."""

import numpy as np

from tests.synthetic import STREAM, begin, finish, make_sample, send, write_rows
from tide_platform.capture.assemble import Assembler
from tide_platform.capture.reader import RingReader
from tide_platform.capture.ring import Ring
from tide_platform.capture.writer import RingWriter


def assembled(tmp_path, fill, max_tokens=4096, **options):
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    fill(RingWriter(ring))
    reader, assembler, samples = RingReader(ring), Assembler(STREAM, max_tokens, **options), []
    while record := reader.peek():
        samples += assembler.take(record)
        reader.advance(record)
    return samples, assembler


def test_the_last_write_of_a_position_wins(tmp_path):
    old, new = make_sample("a", 10, seed=1), make_sample("a", 10, seed=2)

    def retracted(writer):
        begin(writer, old)
        write_rows(writer, old, 0, 7)
        write_rows(writer, new, 0, 10)
        finish(writer, new)

    (found,), _ = assembled(tmp_path, retracted)
    np.testing.assert_array_equal(found.tensors["aux"], new.tensors["aux"])
    np.testing.assert_array_equal(found.tensors["teacher_ids"], new.tensors["teacher_ids"])


def test_rows_beyond_the_tokens_are_cut_and_their_token_is_unknown(tmp_path):
    sample = make_sample("a", 10)

    def stopped_early(writer):
        begin(writer, sample)
        write_rows(writer, sample, 0, 10)
        writer.finish("r-a", sample.meta, 0, sample.tensors["input_ids"][:6])

    (found,), _ = assembled(tmp_path, stopped_early)
    assert found.meta.num_tokens == 6
    assert found.tensors["row_pos"].tolist() == found.tensors["teacher_pos"].tolist() == list(range(6))
    assert np.isnan(found.tensors["token_logp"][5]) and not np.isnan(found.tensors["token_logp"][:5]).any()


def test_holes_of_the_server_stay_visible(tmp_path):
    sample = make_sample("a", 10)

    def prefix_hit(writer):
        begin(writer, sample)
        write_rows(writer, sample, 4, 10)
        finish(writer, sample)

    (found,), _ = assembled(tmp_path, prefix_hit)
    assert found.tensors["row_pos"].tolist() == [4, 5, 6, 7, 8, 9]


def test_a_missing_record_drops_the_request(tmp_path):
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(STREAM, 4096)
    send(writer, make_sample("torn"))
    send(writer, make_sample("whole"))
    reader.advance(reader.peek())  # what a dead spool had taken into its memory
    samples = []
    while record := reader.peek():
        samples += assembler.take(record)
        reader.advance(record)
    assert [sample.meta.sample_id for sample in samples] == ["whole"]
    assert assembler.dropped == {"spool_restarted": 1} and not assembler._ignored


def test_a_long_sample_leaves_as_stretches(tmp_path):
    wanted = make_sample("long", 25, start_pos=100)
    samples, _ = assembled(tmp_path, lambda writer: send(writer, wanted), max_tokens=10)
    assert [sample.meta.sample_id for sample in samples] == ["long.0", "long.1", "long.2"]
    assert [sample.meta.start_pos for sample in samples] == [100, 110, 120]
    assert [sample.meta.num_tokens for sample in samples] == [10, 10, 5]
    assert [sample.meta.verify_rounds for sample in samples] == [0, 0, wanted.meta.verify_rounds]
    assert [sample.meta.finish_reason for sample in samples] == ["continues", "continues", "stop"]
    assert all(sample.meta.flags == ("stretch",) for sample in samples)
    for name in ("input_ids", "aux", "teacher_logp"):
        joined = np.concatenate([sample.tensors[name] for sample in samples])
        np.testing.assert_array_equal(joined, wanted.tensors[name])


def test_memory_is_bounded_by_dropping_the_largest(tmp_path):
    small, large = make_sample("small", 10), make_sample("large", 200, seed=1)

    def fill(writer):
        begin(writer, small)
        write_rows(writer, small, 0, 10)
        send(writer, large, step=20)
        finish(writer, small)

    samples, assembler = assembled(tmp_path, fill, memory_bytes=8000)
    assert [sample.meta.sample_id for sample in samples] == ["small"]
    assert assembler.dropped == {"spool_memory": 1}


def test_no_rows_is_no_sample(tmp_path):
    sample = make_sample("a", 10)

    def only_beyond(writer):
        begin(writer, sample)
        write_rows(writer, sample, 8, 10)
        writer.finish("r-a", sample.meta, 0, sample.tensors["input_ids"][:4])

    samples, assembler = assembled(tmp_path, only_beyond)
    assert samples == [] and assembler.dropped == {"no_rows": 1}
