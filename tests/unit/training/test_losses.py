"""A loss's written-out gradient is autograd's; the fused head is the plain one; teachers agree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from taught import Case, assert_same_gradients, cases, gradients, taught_sample
from tiny import random_draft, tiny_parts

from tide_platform.training import losses as losses_module
from tide_platform.training import teacher as teacher_module
from tide_platform.training.data import collate, prepare, prepare_all
from tide_platform.training.losses import ROWS_AT_ONCE, HeadLoss, RowLoss, soft_cross_entropy
from tide_platform.training.objective import loss_and_stats
from tide_platform.training.teacher import (
    Dense,
    HeadNotLinear,
    LastHidden,
    MissingTeacher,
    Sparse,
    TopK,
    restricted_head,
    target_argmax,
    target_head,
)

VOCAB, WIDTH = 11, 5


def plain_cross_entropy(logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return -(p * logits.log_softmax(-1)).sum(-1)


# every loss beside its plain, taped form
LOSSES = [(soft_cross_entropy, plain_cross_entropy)]


def random_rows(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids and p of 3 tokens, the same p over the vocabulary."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCAB, generator=g)[:3] for _ in range(rows)])
    p = torch.rand(rows, 3, generator=g).softmax(-1)
    dense = torch.zeros(rows, VOCAB).scatter_(1, ids, p)
    return torch.randn(rows, WIDTH, generator=g), ids, p, dense


@pytest.mark.parametrize(("loss", "plain"), LOSSES)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), seed=st.integers(0, 99))
def test_written_gradient_is_autograds(loss: RowLoss, plain: object, rows: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    _, ids, p, dense = random_rows(rows, seed)
    logits = (3 * torch.randn(rows, VOCAB, generator=g)).requires_grad_()
    weight = torch.rand(rows, 1, generator=g)
    expected = plain(logits, dense)  # type: ignore[operator]
    (expected * weight[:, 0]).sum().backward()
    for distribution in (Sparse(ids, p), Dense(dense)):
        value, predicted, gradient = loss(logits.detach(), distribution, weight)
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(gradient, logits.grad)
        assert torch.equal(predicted, logits.argmax(-1))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2 * ROWS_AT_ONCE + 3), st.integers(0, 99))
def test_fused_head_is_the_plain_one(rows: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    hidden, ids, p, dense = random_rows(rows, seed) if rows else (torch.zeros(0, WIDTH), *_no_rows())
    head, weight = torch.randn(VOCAB, WIDTH, generator=g), torch.rand(rows, generator=g)
    leaves = [x.clone().requires_grad_() for x in (hidden, head, hidden, head)]
    fast, _, predicted = HeadLoss.apply(
        leaves[0], leaves[1], TopK(ids, p), None, weight, torch.float32, soft_cross_entropy
    )
    logits = leaves[2] @ leaves[3].T
    slow = (plain_cross_entropy(logits, dense) * weight).sum()
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    assert torch.equal(predicted, logits.argmax(-1))
    (3 * fast).backward()
    (3 * slow).backward()
    for a, b in ((leaves[0], leaves[2]), (leaves[1], leaves[3])):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


def _no_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3), torch.zeros(0, VOCAB)


@settings(max_examples=15, deadline=None)
@given(cases(k=20, max_tokens=12))
def test_teachers_agree_where_k_is_the_whole_vocabulary(case: Case) -> None:
    """To the rounding of the stored log-probabilities (fp16: 2e-3 of a probability)."""
    found = []
    for kind in ("topk", "last_hidden"):
        if not (examples := case.examples(kind)):
            continue
        batch = collate(examples)
        head = restricted_head(case.head_VH, case.draft)
        loss, stats = loss_and_stats(case.draft, case.embed_VH, batch, batch.counts, teacher_head_VH=head)
        found.append((loss.item(), stats.hits, stats.count, gradients(case.draft, loss)))
    if not found:
        return
    (loss, hits, counts, grads), other = found
    assert (hits, counts) == other[1:3] and loss == pytest.approx(other[0], rel=2e-3, abs=1e-4)
    assert_same_gradients(grads, other[3], 5e-3)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 99))
def test_the_two_forms_of_one_distribution_teach_the_same(rows: int, seed: int) -> None:
    """Without storage between them: exactly, up to fp32 rounding."""
    g = torch.Generator().manual_seed(seed)
    hidden, teacher_head, last = (torch.randn(n, WIDTH, generator=g) for n in (rows, VOCAB, rows))
    last = last.bfloat16()
    p, ids = (last.float() @ teacher_head.T).softmax(-1).sort(-1, descending=True)
    head, weight = torch.randn(VOCAB, WIDTH, generator=g), torch.rand(rows, generator=g)
    grads = []
    for teacher in (TopK(ids, p), LastHidden(ids[:, 0], last)):
        leaves = [x.clone().requires_grad_() for x in (hidden, head)]
        arguments = (teacher, teacher_head, weight, torch.float32, soft_cross_entropy)
        loss, _, _ = HeadLoss.apply(*leaves, *arguments)
        loss.backward()
        grads.append((loss.detach(), *(x.grad for x in leaves)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 99))
def test_argmax_in_blocks_is_argmax(vocab: int, block: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(7, 4, generator=g).bfloat16(), torch.randn(vocab, 4, generator=g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_module, "VOCAB_AT_ONCE", block)
        assert torch.equal(target_argmax(hidden, head), (hidden.float() @ head.T).argmax(-1))


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    head_VH = torch.from_numpy(rng.normal(size=(20, 8)).astype(np.float32))
    draft, embed = random_draft(1, draft_vocab=15)
    case = Case(draft, embed, head_VH, [taught_sample(rng, head_VH, "s", 40, 5, 0, 0.1, 4)], 3)
    batch, found = collate(case.examples("last_hidden")), []
    for rows in (256, 3):
        monkeypatch.setattr(losses_module, "ROWS_AT_ONCE", rows)
        loss, _ = loss_and_stats(
            draft, embed, batch, batch.counts, teacher_head_VH=restricted_head(head_VH, draft)
        )
        found.append(gradients(draft, loss))
    assert_same_gradients(*found, 1e-5)


def test_a_last_hidden_teacher_that_is_not_there_is_named() -> None:
    rng = np.random.default_rng(0)
    head_VH = torch.from_numpy(rng.normal(size=(20, 8)).astype(np.float32))
    draft, embed = random_draft(1, draft_vocab=20)
    sample = taught_sample(rng, head_VH, "s7", 12, 4, 0, 0.0, 4)
    inverse = np.arange(20)
    with pytest.raises(MissingTeacher, match=r"s7.*no target head"):
        prepare(sample, inverse, 3, 100, "last_hidden")
    with pytest.raises(MissingTeacher, match="no target head"):
        batch = collate([prepare(sample, inverse, 3, 100, "last_hidden", head_VH)])  # type: ignore[list-item]
        loss_and_stats(draft, embed, batch, batch.counts)
    del sample.tensors["last_hidden"]
    with pytest.raises(MissingTeacher, match=r"s7.*holds no last hidden states; set training\.teacher"):
        prepare_all([sample], inverse, 3, 100, "last_hidden", head_VH)


def test_a_last_hidden_state_that_is_not_finite_is_left_out_by_name() -> None:
    rng = np.random.default_rng(0)
    head_VH = torch.from_numpy(rng.normal(size=(20, 8)).astype(np.float32))
    sample = taught_sample(rng, head_VH, "s", 12, 4, 0, 0.0, 4)
    sample.tensors["last_hidden"][2, 3] = 0xFF80
    assert prepare(sample, np.arange(20), 3, 100, "last_hidden", head_VH) == "teacher is not finite"


def test_a_target_that_bends_its_logits_has_no_exact_teacher() -> None:
    parts = tiny_parts()
    assert target_head(parts) is parts.lm_head_VH
    plain = replace(parts, config=parts.config | {"final_logit_softcapping": None, "logit_scale": 1.0})
    assert target_head(plain) is parts.lm_head_VH
    capped = replace(parts, config=parts.config | {"final_logit_softcapping": 30.0})
    with pytest.raises(HeadNotLinear, match=r"final_logit_softcapping 30\.0.*set training\.teacher to topk"):
        target_head(capped)


def test_the_tiny_targets_last_hidden_states_give_its_logits() -> None:
    """The whole of it on a real model: exact teacher from captured states, and what the top K said."""
    from tiny import bf16_bits, prompts, say, tiny_model

    sample = say(prompts(1), 12)[0]
    ids = torch.from_numpy(sample.tensors["input_ids"]).long()[None]
    with torch.inference_mode():
        hidden = tiny_model().model(input_ids=ids).last_hidden_state[0, sample.tensors["teacher_pos"]]  # type: ignore[operator]
    sample.tensors["last_hidden"] = bf16_bits(hidden)
    inverse = np.arange(256)
    found = [
        prepare(sample, inverse, 3, 100, kind, target_head(tiny_parts())) for kind in ("topk", "last_hidden")
    ]  # type: ignore[arg-type]
    topk, exact = (e.teacher for e in found if not isinstance(e, str))
    assert torch.equal(topk.best_M, exact.best_M)
    block = exact.block(slice(0, len(exact)), tiny_parts().lm_head_VH.float())
    assert isinstance(block, Dense) and isinstance(topk, TopK)
    kept = block.p_NV.gather(1, topk.ids_MK)
    torch.testing.assert_close(kept / kept.sum(1, keepdim=True), topk.p_MK, atol=0.02, rtol=0)
