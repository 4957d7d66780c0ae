"""Samples for benchmarks: every position captured, bytes that do not compress."""

import time

import numpy as np

from tide_platform.capture.record import Sample, SampleMeta, StreamMeta


def plain_meta(stream: StreamMeta, name: str, rows: int) -> SampleMeta:
    """A greedy request of ``rows`` tokens, half of them its prompt."""
    return SampleMeta(
        sample_id=name,
        request_id=name,
        captured_at=time.time(),
        target_digest=stream.target_digest,
        draft_version_start="d",
        draft_version_end="d",
        verify_rule="greedy",
        tenant="default",
        start_pos=0,
        num_tokens=rows,
        prompt_tokens=rows // 2,
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        k=2,
        verify_rounds=100,
        accepted_drafts=100,
        finish_reason="stop",
    )


def random_sample(stream: StreamMeta, rng: np.random.Generator, name: str, rows: int) -> Sample:
    """``rows`` tokens."""
    positions = np.arange(rows, dtype=np.int32)
    shape = (rows, stream.teacher_k)
    tensors = {
        "input_ids": rng.integers(0, stream.vocab_size, rows, dtype=np.int32),
        "row_pos": positions,
        "aux": rng.integers(0, 2**16, (rows, 3 * stream.hidden_size), dtype=np.uint16),
        "teacher_pos": positions,
        "teacher_ids": rng.integers(0, stream.vocab_size, shape, dtype=np.int32),
        "teacher_logp": rng.normal(size=shape).astype(np.float16),
        "token_logp": rng.normal(size=rows).astype(np.float16),
    }
    return Sample(plain_meta(stream, name, rows), tensors)
