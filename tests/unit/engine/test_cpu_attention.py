"""Batched attention against one request, one query at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.engine.cpu.attention import FOLD_LIMIT, Plan, bundle, gather

HEADS, KEY_HEADS, SIZE, SLOTS = 6, 2, 8, 4000


def reference(query, keys, values, table, requests, prefix, tokens, scale):
    out, row = [], 0
    for r, p, t in zip(requests, prefix, tokens, strict=True):
        for i in range(t):
            seen = table[r, : p + i + 1].long()
            k = keys[seen].repeat_interleave(HEADS // KEY_HEADS, 1)
            v = values[seen].repeat_interleave(HEADS // KEY_HEADS, 1)
            q = query[row].view(HEADS, SIZE)
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q, k) * scale, -1)
            out.append(torch.einsum("hl,lhd->hd", weights, v).flatten())
            row += 1
    return torch.stack(out)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.one_of(
        st.tuples(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 9)),
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, FOLD_LIMIT + 20)), min_size=1, max_size=4),
    ),
    seed=st.integers(0, 100),
)
def test_the_batch_attends_as_each_query_alone(shape, seed: int) -> None:
    """Decode, verify and draft steps (equal token counts), prompts, chunks and prefix hits (ragged)."""
    if isinstance(shape, tuple):
        prefix, tokens = shape[0], [shape[1]] * len(shape[0])
    else:
        prefix, tokens = [p for p, _ in shape], [t for _, t in shape]
    generator = torch.Generator().manual_seed(seed)
    requests = torch.randperm(8, generator=generator)[: len(prefix)]
    table = torch.randperm(SLOTS - 1, generator=generator)[: 8 * 400].view(8, 400).int() + 1
    keys, values = (torch.randn(SLOTS, KEY_HEADS, SIZE, generator=generator) for _ in range(2))
    query = torch.randn(sum(tokens), HEADS * SIZE, generator=generator)
    expected = reference(query, keys, values, table, requests.tolist(), prefix, tokens, 0.3)
    # what no request may see: slots of nobody, or of a request that went wrong
    used = torch.cat(
        [table[r, : p + t] for r, p, t in zip(requests.tolist(), prefix, tokens, strict=True)]
    ).long()
    poison = torch.ones(SLOTS, dtype=torch.bool)
    poison[used] = False
    poison[0] = False
    keys[poison], values[poison] = float("nan"), float("nan")
    plan = Plan.build(table, requests, prefix, tokens, HEADS // KEY_HEADS, keys.dtype)
    got = plan.attend(query, keys, values, HEADS, 0.3)
    assert torch.allclose(got, expected, atol=1e-5)


def test_requests_of_like_length_share_a_product_and_unlike_ones_do_not() -> None:
    assert bundle([100, 90, 120], [3, 3, 3]) == [[0, 1, 2]]
    assert bundle([1000, 10, 12], [1, 1, 1]) == [[1, 2], [0]]
    assert bundle([0, 0], [40, 40]) == [[0], [1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 3])
def test_gather_copies_rows(dtype: torch.dtype, size: int) -> None:
    pool = torch.randn(20, 3, size).to(dtype)
    rows = torch.tensor([4, 4, 19], dtype=torch.int32)
    assert torch.equal(gather(pool, rows), pool[rows.long()])
