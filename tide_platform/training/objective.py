"""EAGLE3's objective (design 4.3): soft cross entropy of each unroll step, over the draft's vocabulary.

Loss = sum over steps j of ``DECAY**j / N_j`` times the sum over supervised positions of the soft cross
entropy, N_j the number of supervised positions of step j in the whole optimizer step (over micro-batches); a
step with N_j = 0 is left out. The teacher is the target's top K, restricted to the draft's vocabulary and
renormalised: only its K entries are touched, there is no dense teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tide_platform.draft.eagle3 import Eagle3Draft, Unroll
from tide_platform.training.data import Batch

DECAY = 0.8
ROWS_AT_ONCE = 256  # logits of this many rows exist at a time


class HeadLoss(torch.autograd.Function):
    """Linear head and weighted soft cross entropy in one, a block of rows at a time.

    Both gradients are computed on the way forward, while a block's probabilities are at hand, so neither
    logits nor probabilities are kept: 2 passes over [rows, Vd] fewer, and memory that does not grow with the
    batch.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_NH: torch.Tensor,
        head_VH: torch.Tensor,
        ids_NK: torch.Tensor,
        p_NK: torch.Tensor,
        weight_N: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss (scalar: sum of weight times cross entropy), cross entropy [N], predicted draft id [N]."""
        head, hidden = head_VH.to(dtype), hidden_NH.to(dtype)
        loss_N = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        predicted_N = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=hidden.device)
        for rows in torch.arange(len(hidden), device=hidden.device).split(ROWS_AT_ONCE):
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = hidden[span] @ head.T
            q = torch.softmax(logits, -1, dtype=torch.float32)
            q_top, predicted_N[span] = q.max(-1)
            # log q(v) = logit(v) - logit(top) + log q(top): no second pass over the vocabulary
            top = logits.gather(1, predicted_N[span, None]).float() - q_top.log()[:, None]
            log_q = logits.gather(1, ids_NK[span]).float() - top
            loss_N[span] = -(p_NK[span] * log_q).sum(-1)
            weight = weight_N[span, None]
            q.mul_(weight).scatter_add_(1, ids_NK[span], -p_NK[span] * weight)
            gradient = q.to(dtype)
            grad_hidden[span] = gradient @ head
            grad_head += gradient.T @ hidden[span]
        ctx.save_for_backward(grad_hidden.to(hidden_NH.dtype), grad_head.to(head_VH.dtype))
        ctx.mark_non_differentiable(loss_N, predicted_N)
        return (loss_N * weight_N).sum(), loss_N, predicted_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0], grad_head * grads[0], None, None, None, None


@dataclass(frozen=True)
class StepStats:
    """Sums over supervised positions, for each unroll step."""

    loss: list[float]  # soft cross entropy, nats
    hits: list[int]  # draft argmax == teacher argmax
    count: list[int]


def unroll_steps(draft: Eagle3Draft, embed_VH: torch.Tensor, batch: Batch, steps: int) -> list[torch.Tensor]:
    """Un-normed hidden states [B, R, H] of each step, teacher-forced with the sample's own tokens."""
    context, roots = batch.positions_BC.shape[1], batch.roots
    unroll = Unroll(draft, batch.positions_BC, batch.key_mask_BC, roots)
    embeds = F.embedding(batch.tokens_BW, embed_VH)
    hidden = [unroll.first(embeds[:, 1 : 1 + context], batch.aux_BCF)]
    for j in range(1, steps):
        right = context + 1 + j
        hidden.append(unroll.next(embeds[:, right - roots : right], hidden[-1]))
    return hidden


def loss_and_stats(
    draft: Eagle3Draft,
    embed_VH: torch.Tensor,
    batch: Batch,
    counts: Sequence[int],
    autocast: bool = False,
) -> tuple[torch.Tensor, StepStats]:
    """The batch's share of the loss. ``counts``: N_j over the whole optimizer step, not of this batch alone.

    ``autocast``: matrix products in bf16; residual, norms, softmax and loss stay fp32.
    """
    steps = len(counts)
    device = embed_VH.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = unroll_steps(draft, embed_VH, batch, steps)
    picked = [h.flatten(0, 1).index_select(0, i) for h, i in zip(hidden, batch.root_index, strict=True)]
    normed_NH = draft.norm(torch.cat(picked))
    teacher_N = torch.cat(batch.teacher_index)
    ids_NK, p_NK = batch.teacher_ids_MK[teacher_N], batch.teacher_p_MK[teacher_N]
    weights = [
        torch.full((len(i),), DECAY**j / max(n, 1), device=device)
        for j, (i, n) in enumerate(zip(batch.root_index, counts, strict=True))
    ]
    dtype = torch.bfloat16 if autocast else normed_NH.dtype
    loss, loss_N, predicted_N = HeadLoss.apply(
        normed_NH, draft.lm_head.weight, ids_NK, p_NK, torch.cat(weights), dtype
    )  # type: ignore[misc]
    hit_N = predicted_N == ids_NK[:, 0]
    sizes = batch.counts
    return loss, StepStats(
        loss=[float(x.sum()) for x in loss_N.split(sizes)],
        hits=[int(x.sum()) for x in hit_N.split(sizes)],
        count=sizes,
    )
