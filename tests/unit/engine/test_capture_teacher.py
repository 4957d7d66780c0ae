"""Teacher rows against the plain way to make them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.engine.teacher import HostTeacher, bf16_bits, teacher_rows, top_k


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 5), st.sampled_from([96, 256, 1024, 8192]), st.integers(1, 64), st.integers(0, 1000))
def test_top_k_in_two_stages_is_top_k(rows: int, vocabulary: int, k: int, seed: int) -> None:
    values = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    found, columns = top_k(values, k)
    expected = values.topk(k, -1).values
    assert torch.equal(found, expected)
    assert torch.equal(values.gather(1, columns), expected)
    assert all(len(set(row)) == k for row in columns.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_teacher_rows_are_log_probabilities(dtype: torch.dtype) -> None:
    raw = (torch.randn(3, 1024, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    emitted = torch.tensor([5, 77, 1023], dtype=torch.int32)
    rows = teacher_rows(raw, 8, emitted)
    expected = torch.log_softmax(raw.float(), -1)
    assert rows.ids.dtype == np.int32 and rows.logp.dtype == rows.token_logp.dtype == np.float16
    first = expected.gather(1, torch.from_numpy(rows.ids[:, :1]).long())  # bf16 ties
    assert torch.equal(first, expected.amax(-1, keepdim=True))
    np.testing.assert_allclose(rows.logp, expected.topk(8, -1).values.numpy(), rtol=1e-3)
    np.testing.assert_allclose(
        rows.token_logp, expected.gather(1, emitted.long().view(-1, 1)).view(-1).numpy(), rtol=1e-3
    )


RUNS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(RUNS, min_size=1, max_size=3),
    st.sampled_from([1000, 1024, 4096]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_teacher_rows_of_runs_are_those_of_the_rows_together(
    steps: list[list[int]], vocabulary: int, half: bool, seed: int
) -> None:
    """Step after step: what was made earlier stays as it was."""
    made, teacher, random = [], HostTeacher(8), torch.Generator().manual_seed(seed)
    for runs in steps:
        raw = torch.randn(sum(runs), vocabulary, generator=random).to(
            torch.bfloat16 if half else torch.float32
        )
        emitted = torch.randint(0, vocabulary, (len(raw),), generator=random, dtype=torch.int32)
        made.append((teacher.rows(raw.split(runs), emitted.numpy()), teacher_rows(raw, 8, emitted)))
    for found, expected in made:
        for name in ("ids", "logp", "token_logp", "last_hidden"):
            a, b = getattr(found, name), getattr(expected, name)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_bits_read_back(dtype: torch.dtype) -> None:
    hidden = (torch.randn(4, 6, generator=torch.Generator().manual_seed(2)) * 100).to(dtype)
    bits = bf16_bits(hidden)
    assert bits.dtype == np.uint16
    back = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(back, hidden.to(torch.bfloat16))
