"""Requests that leave as stretches while they run, against a slow and obvious reference; bounded memory."""

from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synthetic import STREAM, make_meta
from tide_platform.capture.assemble import Assembler
from tide_platform.capture.reader import RingReader
from tide_platform.capture.record import StreamMeta
from tide_platform.capture.ring import Ring
from tide_platform.capture.writer import RingWriter

L = 16  # tokens of a stretch
K, WIDTH = STREAM.teacher_k, 3 * STREAM.hidden_size


class Reference:
    """One request, position by position."""

    def __init__(self, meta):
        self.meta, self.base, self.given = meta, meta.start_pos, meta.start_pos
        self.rows, self.teachers, self.tokens = {}, {}, {}
        self.number, self.left, self.samples = 0, False, []

    def write(self, pos, aux, teacher_pos, teachers, tokens_pos, tokens):
        self.rows |= {pos + at: row for at, row in enumerate(aux) if pos + at >= self.base}
        kept = range(max(0, self.base - teacher_pos), len(teachers[0]))
        self.teachers |= {teacher_pos + at: [part[at] for part in teachers] for at in kept}
        self.tokens |= {tokens_pos + at: token for at, token in enumerate(tokens)}
        self.given = max(self.given, tokens_pos + len(tokens)) if len(tokens) else self.given
        self._leave()

    def finish(self, meta, tokens_pos, tokens):
        self.tokens |= {tokens_pos + at: token for at, token in enumerate(tokens)}
        self.given = tokens_pos + len(tokens)
        self.meta = replace(self.meta, flags=meta.flags)
        self._leave()
        end = min(self.given, self.base + L)
        self.left = self.left or self.given > end
        return self._emit(meta, end, self.given)

    def _leave(self):
        while any(self.base + L <= pos < self.given for pos in self.rows):
            self.left = True
            meta = replace(self.meta, verify_rounds=0, accepted_drafts=0, finish_reason="continues")
            self._emit(meta, self.base + L, None)
            self.base, self.number = self.base + L, self.number + 1

    def _emit(self, meta, end, stop):
        rows = sorted(pos for pos in self.rows if self.base <= pos < end)
        if not rows:
            return False
        teachers = sorted(pos for pos in self.teachers if self.base <= pos < end)
        name = f"{meta.sample_id}.{self.number}" if self.left else meta.sample_id
        flags = meta.flags + (("stretch",) if self.left else ())
        self.samples.append(
            (
                replace(meta, sample_id=name, start_pos=self.base, num_tokens=end - self.base, flags=flags),
                {
                    "input_ids": [self.tokens[pos] for pos in range(self.base, end)],
                    "row_pos": rows,
                    "aux": [self.rows[pos] for pos in rows],
                    "teacher_pos": teachers,
                    "teacher_ids": [self.teachers[pos][0] for pos in teachers],
                    "teacher_logp": [self.teachers[pos][1] for pos in teachers],
                    "token_logp": [
                        self.teachers[pos][2] if pos + 1 != stop else np.float16(np.nan) for pos in teachers
                    ],
                },
            )
        )
        return True


def drain(reader, assembler, records=10**9):
    found = []
    while records and (record := reader.peek()):
        for sample in assembler.take(record):
            copies = {name: array.copy() for name, array in sample.tensors.items()}
            found.append((sample.meta, copies))
            assembler.release(sample.meta.sample_id)
        reader.advance(record)
        records -= 1
    return found


STEP = st.tuples(
    st.integers(0, 3),  # who
    st.sampled_from("wwwwwwwfdrtu"),
    st.integers(0, 24),  # rows, records
    st.integers(0, 40),  # tokens that lag behind, what is cut at the end, how far a retraction goes back
)


@pytest.mark.parametrize("ring_bytes", [1 << 16, 1 << 20])
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=120), seed=st.integers(0, 99))
def test_any_interleaving_equals_the_reference(tmp_path_factory, ring_bytes, steps, seed):
    """w: rows and some tokens, t: retraction, u: an update, f: finish, d: discard, r: the reader reads on."""
    rng = np.random.default_rng(seed)
    ring = Ring.create(tmp_path_factory.mktemp("ring") / "ring", ring_bytes, STREAM)
    writer, reader = RingWriter(ring), RingReader(ring)
    assembler = Assembler(STREAM, L, clock=lambda: 1.8e9)
    open_: dict[int, tuple[Reference, int]] = {}  # who -> reference, next row
    wanted, found, dropped, no_rows = {}, [], 0, 0
    for number, (who, action, amount, lag) in enumerate(steps):
        rid = f"r{who}"
        if action == "r":
            found += drain(reader, assembler, amount)
            continue
        if who not in open_:
            start = lag if amount % 3 == 0 else 0
            known = make_meta(
                f"s{number}", 0, start_pos=start, verify_rounds=0, accepted_drafts=0, finish_reason=""
            )
            if not writer.begin(rid, known):
                writer.discard(rid, "ring_full")
                dropped += 1
                continue
            # the first rows may be missing (a prefix hit)
            open_[who] = (Reference(known), start + (amount if lag % 4 == 0 else 0))
            wanted[known.sample_id] = open_[who][0]
        reference, row = open_[who]
        start = reference.meta.start_pos
        if action == "t":
            open_[who] = (reference, max(start, row - lag))
        elif action == "u":
            version = f"d{number}"
            writer.update(rid, draft_version_end=version, flags=("adaptive_k",))
            if rid not in writer._open:
                writer.discard(rid, "ring_full")
                dropped += 1
                del open_[who]
                continue
            flags = tuple(dict.fromkeys((*reference.meta.flags, "adaptive_k")))
            reference.meta = replace(reference.meta, draft_version_end=version, flags=flags)
        elif action == "w":
            aux = rng.integers(0, 2**16, (amount, WIDTH), dtype=np.uint16)
            teachers = (
                rng.integers(0, 256, (amount, K), dtype=np.int32),
                rng.normal(size=(amount, K)).astype(np.float16),
                rng.normal(size=amount).astype(np.float16),
            )
            confirmed = max(reference.given, row + amount - lag)
            if lag > 30:  # a prompt: its tokens are known ahead of the rows
                confirmed = max(confirmed, row + amount + lag)
            tokens = rng.integers(0, 256, confirmed - reference.given, dtype=np.int32)
            args = (row, aux, row, *teachers, reference.given, tokens)
            if writer.write(rid, *args):
                reference.write(row, aux, row, teachers, reference.given, tokens)
                open_[who] = (reference, row + amount)
            else:
                writer.discard(rid, "ring_full")
                dropped += 1
                del open_[who]
        elif action == "f":
            del open_[who]
            end = max(reference.given, row - lag % 4)
            tail_pos = max(start, reference.given - lag % 3) if reference.base < reference.given - 2 else None
            tail_pos = reference.given if tail_pos is None else tail_pos
            tail = rng.integers(0, 256, end - tail_pos, dtype=np.int32)
            final = replace(
                reference.meta,
                verify_rounds=5,
                accepted_drafts=7,
                finish_reason="stop",
                flags=("grammar", *reference.meta.flags),
            )
            has_rows = rid in writer._open and writer._open[rid].rows
            if writer.finish(rid, final, tail_pos, tail):
                no_rows += not reference.finish(final, tail_pos, tail)
            else:
                dropped += 1 if has_rows else 0
                no_rows += not has_rows
        else:
            del open_[who]
            writer.discard(rid, "aborted")
    found += drain(reader, assembler)
    samples = {meta.sample_id: (meta, tensors) for meta, tensors in found}
    assert len(samples) == len(found), "none twice"
    expected = {meta.sample_id: (meta, t) for of in wanted.values() for meta, t in of.samples}
    assert samples.keys() == expected.keys()
    for name, (meta, tensors) in expected.items():
        assert samples[name][0] == meta
        for key, value in tensors.items():
            array = samples[name][1][key]
            np.testing.assert_array_equal(array, np.asarray(value, array.dtype).reshape(array.shape), key)
    lost = {**writer.dropped}
    lost.pop("aborted", None)
    assert lost.pop("ring_full", 0) == dropped
    assert lost.pop("no_rows", 0) + assembler.dropped.pop("no_rows", 0) == no_rows
    assert not lost and not assembler.dropped
    assert assembler.in_flight == len(open_)


def test_a_request_of_128k_positions_takes_constant_memory(tmp_path):
    stream = StreamMeta("t" * 16, hidden_size=256, vocab_size=256, aux_layer_ids=(2, 4, 6), teacher_k=16)
    positions, length, step = 1 << 17, 4096, 64
    ring = Ring.create(tmp_path / "ring", 8 << 20, stream)
    writer, reader, assembler = RingWriter(ring), RingReader(ring), Assembler(stream, length)
    rng = np.random.default_rng(0)
    aux = rng.integers(0, 2**16, (step, 768), dtype=np.uint16)
    ids = np.zeros((step, 16), np.int32)
    logp, token = np.zeros((step, 16), np.float16), np.zeros(step, np.float16)
    stretch = length * (aux.itemsize * 768 + 6 * 16 + 2)
    meta, most, samples, before = make_meta("long", 0), 0, 0, 0
    writer.begin("r", meta)
    for pos in range(0, positions, step):
        # tokens lag a round behind
        tokens = np.full(step if pos else 0, pos // length, np.int32)
        assert writer.write("r", pos, aux, pos, ids, logp, token, max(0, pos - step), tokens)
        samples += len(drain(reader, assembler))
        most = max(most, assembler.bytes)
        if pos == 4 * length:
            before = psutil.Process().memory_info().rss
    writer.finish("r", meta, positions - step, np.zeros(step, np.int32))
    samples += len(drain(reader, assembler))
    grown = psutil.Process().memory_info().rss - before
    assert samples == positions // length == 32
    assert most < 2.5 * stretch, "one stretch and the beginning of the next"
    assert grown < 4 * stretch, f"{grown} bytes more after {positions} positions"
    assert assembler.in_flight == 0
