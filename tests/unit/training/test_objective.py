"""The fast objective against the slow, obvious one; the mask rule; padding and splitting change nothing."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import chain_logits, slow_objective
from taught import Case, assert_same_gradients, cases, gradients
from tiny import bf16_bits, make_meta, random_draft

from tide_platform.capture.record import Sample
from tide_platform.training.data import NothingToTrain, collate, prepare, prepare_all, supervision
from tide_platform.training.objective import loss_and_stats, unroll_steps
from tide_platform.training.teacher import TopK, restricted_head

STEPS = 3
REL = 2e-4  # of fp32 against fp64: gradients of up to 4 chained steps


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(["topk", "last_hidden"]))
def test_fast_objective_is_the_slow_one(case: Case, teacher: str) -> None:
    """Loss, N_j, hits and the gradient of every parameter, for both teachers."""
    slow_draft, slow_embed = case.wide()
    said = {} if teacher == "topk" else {"teacher": case.whole_softmax}
    slow, counts, hits = slow_objective(slow_draft, slow_embed, case.samples, case.steps, **said)
    examples = case.examples(teacher)
    if not sum(counts):
        assert not examples
        with pytest.raises(NothingToTrain):
            prepare_all(case.samples, case.inverse, case.steps, 100)
        return
    batch = collate(examples)
    head = restricted_head(case.head_VH, case.draft)
    fast, stats = loss_and_stats(case.draft, case.embed_VH, batch, batch.counts, teacher_head_VH=head)
    assert batch.counts == counts and stats.hits == hits
    assert fast.item() == pytest.approx(slow.item(), rel=1e-4, abs=1e-5)
    assert_same_gradients(gradients(slow_draft, slow), gradients(case.draft, fast), REL)


@settings(max_examples=25, deadline=None)
@given(cases(samples=4, max_tokens=16), st.data())
def test_loss_and_gradients_do_not_depend_on_how_a_step_is_split(case: Case, data: st.DataObject) -> None:
    """N_j is the whole optimizer step's; any split into packed batches, in any order, gives the same."""
    examples = case.examples()
    if not examples:
        return
    whole = collate(examples)
    order = data.draw(st.permutations(range(len(examples))))
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(examples))))), len(examples)]
    parts = [[examples[i] for i in order[a:b]] for a, b in pairwise(cuts) if a < b]
    assert sum(map(len, parts)) == len(examples)
    losses = [loss_and_stats(case.draft, case.embed_VH, collate(part), whole.counts)[0] for part in parts]
    loss, stats = loss_and_stats(case.draft, case.embed_VH, whole, whole.counts)
    total = sum(losses, torch.zeros(()))
    assert total.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
    assert loss.item() == pytest.approx(
        sum(0.8**j * x / n for j, (x, n) in enumerate(zip(stats.loss, stats.count, strict=True)) if n),
        rel=1e-4,
        abs=1e-5,
    )
    split = gradients(case.draft, total)
    assert_same_gradients(gradients(case.draft, loss), split, REL)


def one(tokens: int, prompt: int, teacher: list[int], rows: list[int] | None = None) -> Sample:
    """A sample whose teacher rows' argmax is token 1."""
    rows = list(range(tokens)) if rows is None else rows
    tensors = {
        "input_ids": np.arange(tokens, dtype=np.int32),
        "row_pos": np.array(rows, np.int32),
        "aux": bf16_bits(torch.ones(len(rows), 24)),
        "teacher_pos": np.array(teacher, np.int32),
        "teacher_ids": np.tile(np.array([1, 2], np.int32), (len(teacher), 1)),
        "teacher_logp": np.tile(np.array([-0.5, -1.0], np.float16), (len(teacher), 1)),
        "token_logp": np.zeros(len(teacher), np.float16),
    }
    return Sample(make_meta("one", tokens, prompt), tensors)


def roots(sample: Sample, ok: bool = True) -> list[list[int]]:
    teacher_ok = np.full(len(sample.tensors["teacher_pos"]), ok)
    return [p[:, 0].tolist() for p in supervision(sample, teacher_ok, STEPS, sample.meta.num_tokens)]


def test_mask_both_embedded_and_predicted_are_response_tokens() -> None:
    # prompt 0..3, response 4..8: step 0 at t = 3 embeds x4 and predicts x5; t = 6 embeds x7 and predicts x8,
    # the last
    assert roots(one(9, 4, list(range(3, 9)))) == [[3, 4, 5, 6], [2, 3, 4, 5], [1, 2, 3, 4]]


def test_mask_missing_teacher_row_and_hole() -> None:
    assert roots(one(9, 4, [3, 4, 6, 7], rows=[0, 1, 2, 3, 5, 6, 7]))[0] == [3, 5, 6]
    assert roots(one(9, 4, [3, 4, 6, 7]))[0] == [3, 5, 6]  # teacher row 5 belongs to t = 4


def test_mask_teacher_argmax_outside_the_draft_vocabulary() -> None:
    assert roots(one(9, 4, list(range(3, 9))), ok=False) == [[], [], []]


def test_teacher_is_restricted_and_renormalised() -> None:
    inverse = np.full(20, -1)
    inverse[1] = 0
    example = prepare(one(9, 4, list(range(3, 9))), inverse, STEPS, 100)
    assert not isinstance(example, str)
    assert isinstance(example.teacher, TopK)
    assert torch.equal(example.teacher.p_MK, torch.tensor([[1.0, 0.0]] * 6))
    assert torch.equal(example.teacher.best_M, torch.zeros(6, dtype=torch.int64))


def test_later_stretch_of_a_request_is_all_response() -> None:
    sample = one(6, 4, list(range(6)))
    moved = Sample(make_meta("two", 6, 4, start=100), sample.tensors | {
        "row_pos": sample.tensors["row_pos"] + np.int32(100),
        "teacher_pos": sample.tensors["teacher_pos"] + np.int32(100),
    })  # fmt: skip
    assert roots(moved)[0] == [0, 1, 2, 3]


def test_a_step_that_supervises_nothing_is_left_out() -> None:
    """A response of two tokens has one supervised position, at step 0: the loss is that row's alone."""
    draft, embed = random_draft(0, draft_vocab=20)
    example = prepare(one(6, 4, [3, 4, 5]), np.arange(20), STEPS, 100)
    assert not isinstance(example, str)
    batch = collate([example])
    loss, stats = loss_and_stats(draft, embed, batch, batch.counts)
    # t = 3 embeds x4 and predicts x5 (step 0); t = 2 embeds x4 at step 1, t = 1 at step 2
    assert stats.count == [1, 1, 1]
    short = prepare(one(6, 4, [4], rows=[0, 3, 4]), np.arange(20), STEPS, 100)
    assert not isinstance(short, str)
    batch = collate([short])
    loss, stats = loss_and_stats(draft, embed, batch, batch.counts)
    assert stats.count == [1, 0, 0] and loss.item() == pytest.approx(stats.loss[0])


@pytest.mark.parametrize("hole", [None, 4])
def test_attention_pattern(hole: int | None) -> None:
    """Every step of every chain equals the chain computed alone, with and without a hole among the keys."""
    draft, embed = random_draft(3, draft_vocab=20)
    sample = one(9, 4, list(range(3, 9)), rows=[i for i in range(9) if i != hole])
    sample.tensors["aux"][:] = bf16_bits(torch.randn(len(sample.tensors["aux"]), 24))
    example = prepare(sample, np.arange(20), STEPS, 100)
    assert not isinstance(example, str)
    hidden = unroll_steps(draft, embed, collate([example]), STEPS)
    bits = torch.from_numpy(sample.tensors["aux"].view("int16")).view(torch.bfloat16).float()
    aux = {int(p): bits[i] for i, p in enumerate(sample.tensors["row_pos"])}
    tokens = dict(enumerate(range(9)))
    first = example.context - example.roots
    for t in range(first, example.context):
        if t == hole:
            continue
        slow = chain_logits(draft, embed, tokens, aux, t, STEPS)
        for j in range(STEPS):
            fast = draft.lm_head(draft.norm(hidden[j][0, t - first]))
            assert torch.allclose(fast, slow[j], atol=1e-4), (t, j)


def test_infinite_states_are_left_out_by_name() -> None:
    sample = one(9, 4, list(range(3, 9)))
    sample.tensors["aux"][2, 0] = 0x7F80
    assert prepare(sample, np.arange(20), STEPS, 100) == "aux states are not finite"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 1])
def test_a_teacher_that_is_not_finite_is_left_out_by_name(bad: float, column: int) -> None:
    sample = one(9, 4, list(range(3, 9)))
    sample.tensors["teacher_logp"][1, column] = bad
    found = prepare(sample, np.arange(20), STEPS, 100)
    if column and bad == -np.inf:  # a token of probability 0
        assert not isinstance(found, str) and isinstance(found.teacher, TopK)
        assert found.teacher.p_MK[1].tolist() == [1, 0]
    else:
        assert found == "teacher is not finite"
    with pytest.raises(NothingToTrain, match="1 x aux states are not finite"):
        sample = one(9, 4, list(range(3, 9)))
        sample.tensors["aux"][4] = 0x7FC0
        prepare_all([sample], np.arange(20), STEPS, 100)


def test_a_prefix_cache_hit_leaves_holes_that_teach_nothing_and_are_seen_by_nobody() -> None:
    """Positions 0..4 came from the cache: their rows are absent, the other rows know their positions."""
    sample = one(9, 4, list(range(3, 9)), rows=[5, 6, 7, 8])
    example = prepare(sample, np.arange(20), STEPS, 100)
    assert not isinstance(example, str)
    batch = collate([example])
    assert roots(sample) == [[5, 6], [5], []]
    assert batch.key_mask_1P.tolist() == [[False] * 5 + [True] * 2]


def test_rows_that_are_not_as_many_as_their_positions_are_left_out_by_name() -> None:
    sample = one(9, 4, list(range(3, 9)))
    for name, reason in (("row_pos", "aux rows"), ("teacher_pos", "teacher rows")):
        cut = Sample(sample.meta, sample.tensors | {name: sample.tensors[name][:-1]})
        assert prepare(cut, np.arange(20), STEPS, 100) == f"fewer or more {reason} than positions"
