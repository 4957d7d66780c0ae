"""The fast objective against the slow, obvious one; the mask rule; padding and splitting change nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import chain_logits, slow_objective
from tiny import bf16_bits, make_meta, random_draft, random_sample

from tide_platform.capture.record import Sample
from tide_platform.config.schema import Training
from tide_platform.draft.vocab import inverse_map
from tide_platform.training.data import NothingToTrain, collate, prepare, prepare_all, supervision
from tide_platform.training.objective import loss_and_stats, unroll_steps
from tide_platform.training.trainer import accumulate

STEPS = 3


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[Sample]]:
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    samples = []
    for n in range(draw(st.integers(1, 3))):
        start = draw(st.sampled_from([0, 0, 5]))
        tokens = draw(st.integers(1, 9))
        prompt = draw(st.integers(1, start + tokens))
        samples.append(random_sample(rng, f"s{n}", tokens, prompt, start, draw(st.sampled_from([0.0, 0.3]))))
    return seed, samples


@settings(max_examples=40, deadline=None)
@given(batches())
def test_fast_objective_is_the_slow_one(case: tuple[int, list[Sample]]) -> None:
    seed, samples = case
    draft, embed = random_draft(seed % 1000)
    slow, counts, hits = slow_objective(draft, embed, samples, STEPS)
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    if not sum(counts):
        with pytest.raises(NothingToTrain):
            prepare_all(samples, inverse, STEPS, 100)
        return
    examples, _ = prepare_all(samples, inverse, STEPS, 100)
    batch = collate(examples)
    fast, stats = loss_and_stats(draft, embed, batch, batch.counts)
    assert batch.counts == counts and stats.hits == hits
    assert torch.allclose(fast, slow, rtol=1e-4, atol=1e-5)
    names = [n for n, _ in draft.named_parameters()]
    slow_gradients = torch.autograd.grad(slow, list(draft.parameters()), allow_unused=True)
    fast_gradients = torch.autograd.grad(fast, list(draft.parameters()), allow_unused=True)
    for name, a, b in zip(names, slow_gradients, fast_gradients, strict=True):
        a, b = (torch.zeros(1) if g is None else g for g in (a, b))
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4), name


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
    assert torch.equal(example.teacher_p_MK, torch.tensor([[1.0, 0.0]] * 6))


def test_later_stretch_of_a_request_is_all_response() -> None:
    sample = one(6, 4, list(range(6)))
    moved = Sample(make_meta("two", 6, 4, start=100), sample.tensors | {
        "row_pos": sample.tensors["row_pos"] + np.int32(100),
        "teacher_pos": sample.tensors["teacher_pos"] + np.int32(100),
    })  # fmt: skip
    assert roots(moved)[0] == [0, 1, 2, 3]


def test_normalisation_does_not_depend_on_padding_or_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, f"s{i}", n, 3, 0, 0.0) for i, n in enumerate((6, 30, 9, 17))]
    draft, embed = random_draft(0, draft_vocab=18)
    inverse = inverse_map(draft.d2t.numpy(), 20)
    examples, _ = prepare_all(samples, inverse, STEPS, 100)
    results = []
    for limit in (10_000, 1):
        monkeypatch.setattr("tide_platform.training.trainer.MAX_POSITIONS", limit)
        draft.zero_grad()
        losses, _ = accumulate(draft, embed, examples, Training(autocast=False))
        results.append((losses, [p.grad.clone() for p in draft.parameters() if p.grad is not None]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(results[0][1], results[1][1], strict=True))


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
