"""Documents packed into one row: each attends to itself only; the same numbers as one at a time."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from taught import Case, assert_same_gradients, cases, gradients

from tide_platform.draft.eagle3 import Unroll
from tide_platform.training.data import Batch, Example, collate
from tide_platform.training.objective import loss_and_stats, unroll_steps


@settings(max_examples=20, deadline=None)
@given(cases(samples=4, max_tokens=16))
def test_packed_is_one_at_a_time(case: Case) -> None:
    """Loss, N_j, hits and the gradient of every parameter."""
    examples = case.examples()
    if not examples:
        return
    packed = collate(examples)
    loss, stats = loss_and_stats(case.draft, case.embed_VH, packed, packed.counts)
    alone = [loss_and_stats(case.draft, case.embed_VH, collate([e]), packed.counts) for e in examples]
    assert [sum(s.count[j] for _, s in alone) for j in range(case.steps)] == stats.count
    assert [sum(s.hits[j] for _, s in alone) for j in range(case.steps)] == stats.hits
    total = sum((one for one, _ in alone), torch.zeros(()))
    assert loss.item() == pytest.approx(total.item(), rel=1e-5, abs=1e-6)
    assert_same_gradients(gradients(case.draft, loss), gradients(case.draft, total), 1e-4)


@settings(max_examples=15, deadline=None)
@given(cases(samples=4, max_tokens=16))
def test_packed_is_left_padded(case: Case) -> None:
    """The rectangles that replay works on give the hidden states of the packed row."""
    examples = case.examples()
    if not examples:
        return
    with torch.no_grad():
        packed = unroll_steps(case.draft, case.embed_VH, collate(examples), case.steps)
        padded = left_padded(case, examples)
    for j, (row_1QH, rectangle_BRH) in enumerate(zip(packed, padded, strict=True)):
        for e, hidden in zip(examples, row_1QH[0].split([e.roots for e in examples]), strict=True):
            torch.testing.assert_close(
                hidden, rectangle_BRH[examples.index(e), -e.roots :], rtol=1e-4, atol=1e-4, msg=f"step {j}"
            )


def left_padded(case: Case, examples: list[Example]) -> list[torch.Tensor]:
    context, roots = max(e.context for e in examples), max(e.roots for e in examples)
    tokens = torch.zeros(len(examples), context + case.steps, dtype=torch.int64)
    positions = torch.zeros(len(examples), context, dtype=torch.int64)
    mask = torch.zeros(len(examples), context, dtype=torch.bool)
    aux = torch.zeros(len(examples), context, examples[0].aux_CF.shape[1], dtype=torch.bfloat16)
    for b, e in enumerate(examples):
        left, tail = context - e.context, e.tokens_T[: e.context + case.steps]
        tokens[b, left : left + len(tail)] = tail
        positions[b, left:] = e.start + torch.arange(e.context)
        mask[b, left:], aux[b, left:] = e.row_C, e.aux_CF
    unroll = Unroll(case.draft, positions, mask, roots)
    embeds = case.embed_VH[tokens]
    hidden = [unroll.first(embeds[:, 1 : 1 + context], aux)]
    for j in range(1, case.steps):
        right = context + 1 + j
        hidden.append(unroll.next(embeds[:, right - roots : right], hidden[-1]))
    return hidden


@settings(max_examples=25, deadline=None)
@given(cases(samples=3, max_tokens=12), st.data())
def test_a_context_row_is_seen_by_later_roots_of_its_document_alone(case: Case, data: st.DataObject) -> None:
    """Change one row: exactly the chains at its position and behind it, in its own document, change at every
    step. A hole's row is seen by its own chain only (that one supervises nothing).
    """
    examples = case.examples()
    if not examples:
        return
    batch = collate(examples)
    changed = data.draw(st.integers(0, batch.positions_1P.shape[1] - 1))
    before, after = (hidden_states(case, b) for b in (batch, with_other_row(batch, changed)))
    document = [b for b, e in enumerate(examples) for _ in range(e.context)][changed]
    offset = changed - sum(e.context for e in examples[:document])
    hole = not bool(batch.key_mask_1P[0, changed])
    expected = []
    for b, e in enumerate(examples):
        for t in range(e.context - e.roots, e.context):
            expected.append(b == document and (t == offset if hole else t >= offset))
    for x, y in zip(before, after, strict=True):
        assert (x != y).any(-1)[0].tolist() == expected


def hidden_states(case: Case, batch: Batch) -> list[torch.Tensor]:
    with torch.no_grad():
        return unroll_steps(case.draft, case.embed_VH, batch, case.steps)


def with_other_row(batch: Batch, at: int) -> Batch:
    other = copy.deepcopy(batch)
    other.aux_1PF[0, at] = torch.linspace(-2, 3, other.aux_1PF.shape[-1])
    return other
