"""Small captured samples with known content, for tests of every layer. No torch, no server."""

from dataclasses import replace

import numpy as np

from tide_platform.capture.record import Sample, SampleMeta, StreamMeta
from tide_platform.capture.writer import RingWriter

STREAM = StreamMeta(
    target_digest="t" * 16, hidden_size=8, vocab_size=256, aux_layer_ids=(2, 4, 6), teacher_k=4
)
LAST_STREAM = replace(STREAM, target_signal="last_hidden")


def make_meta(sample_id: str, tokens: int, **changes: object) -> SampleMeta:
    meta = SampleMeta(
        sample_id=sample_id,
        request_id=f"r-{sample_id}",
        captured_at=1.8e9,
        target_digest=STREAM.target_digest,
        draft_version_start="d0",
        draft_version_end="d0",
        verify_rule="greedy",
        tenant="default",
        start_pos=0,
        num_tokens=tokens,
        prompt_tokens=max(1, tokens // 2),
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        k=2,
        verify_rounds=5,
        accepted_drafts=7,
        finish_reason="stop",
        adapter="test",
    )
    return replace(meta, **changes)


def make_rows(seed: int, tokens: int, stream: StreamMeta = STREAM) -> dict[str, np.ndarray]:
    """All tensors of a sample of ``tokens`` tokens, every position captured."""
    rng = np.random.default_rng(seed)
    k, positions = stream.teacher_k, np.arange(tokens, dtype=np.int32)
    token_logp = rng.normal(size=tokens).astype(np.float16)
    token_logp[-1] = np.nan
    last = {"last_hidden": rng.integers(0, 2**16, (tokens, stream.last_width), dtype=np.uint16)}
    return {
        "input_ids": rng.integers(0, stream.vocab_size, tokens, dtype=np.int32),
        "row_pos": positions,
        "aux": rng.integers(0, 2**16, (tokens, 3 * stream.hidden_size), dtype=np.uint16),
        "teacher_pos": positions.copy(),
        "teacher_ids": rng.integers(0, stream.vocab_size, (tokens, k), dtype=np.int32),
        "teacher_logp": rng.normal(size=(tokens, k)).astype(np.float16),
        "token_logp": token_logp,
    } | (last if stream.last_width else {})


def make_sample(
    sample_id: str, tokens: int = 12, seed: int = 0, stream: StreamMeta = STREAM, **changes: object
) -> Sample:
    meta = make_meta(sample_id, tokens, **changes)
    stream = replace(stream, target_digest=meta.target_digest)
    return Sample(meta, make_rows(seed, tokens, stream))


def begin(writer: RingWriter, sample: Sample) -> bool:
    """The sample's request is admitted: its meta as far as it is known then."""
    known = replace(sample.meta, num_tokens=0, verify_rounds=0, accepted_drafts=0, finish_reason="", flags=())
    return writer.begin(sample.meta.request_id, known)


def write_rows(writer: RingWriter, sample: Sample, first: int, last: int, confirmed: bool = False) -> bool:
    """Rows and teacher rows ``first … last-1`` of the sample, as one round of a server would write them, with
    their tokens where ``confirmed``.
    """
    of, tensors, start = slice(first, last), sample.tensors, sample.meta.start_pos + first
    return writer.write(
        sample.meta.request_id,
        start,
        tensors["aux"][of],
        start,
        tensors["teacher_ids"][of],
        tensors["teacher_logp"][of],
        tensors["token_logp"][of],
        start,
        tensors["input_ids"][of] if confirmed else tensors["input_ids"][:0],
        tensors["last_hidden"][of] if "last_hidden" in tensors else None,
    )


def finish(writer: RingWriter, sample: Sample, first: int = 0) -> bool:
    """The request's end; its tokens from index ``first`` on were not confirmed before."""
    meta = sample.meta
    return writer.finish(meta.request_id, meta, meta.start_pos + first, sample.tensors["input_ids"][first:])


def send(writer: RingWriter, sample: Sample, step: int = 3, confirmed: bool = False) -> bool:
    """The whole sample: its begin, rounds of ``step`` rows, its end."""
    tokens = sample.meta.num_tokens
    begin(writer, sample)
    for first in range(0, tokens, step):
        write_rows(writer, sample, first, min(first + step, tokens), confirmed)
    return finish(writer, sample, tokens if confirmed else 0)


def assert_same(found: Sample, wanted: Sample) -> None:
    assert found.meta == wanted.meta
    for name, array in wanted.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], array, err_msg=name)
