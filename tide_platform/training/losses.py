"""What a draft step is punished by. A loss is one function; everything around it is the same for all.

Shapes: N rows, V draft vocabulary, H hidden.
"""

from typing import Any, Protocol

import torch

from tide_platform.training.teacher import Distribution, Teacher

ROWS_AT_ONCE = 256  # logits of this many rows exist at a time


class RowLoss(Protocol):
    """A loss of draft logits against the teacher's distribution p, with its gradient.

    Returns ``(loss fp32 [N], predicted draft id int64 [N], gradient fp32 [N, V] of weight * loss by the
    logits)``. The gradient is written out, not taped: while a block's probabilities are at hand it costs
    nothing more.
    """

    def __call__(
        self, logits_NV: torch.Tensor, p: Distribution, weight_N1: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def soft_cross_entropy(
    logits_NV: torch.Tensor, p: Distribution, weight_N1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``-sum over v of p(v) log q(v)``, q the softmax of the logits; gradient ``q - p`` (p sums to 1)."""
    q = torch.softmax(logits_NV, -1, dtype=torch.float32)
    q_top, predicted_N = q.max(-1)
    # log q(v) = logit(v) - logit(top) + log q(top): no second pass over the vocabulary
    shift_N1 = logits_NV.gather(1, predicted_N[:, None]).float() - q_top.log()[:, None]
    loss_N = -p.expectation(logits_NV, shift_N1)
    gradient = q.mul_(weight_N1)
    p.subtract(gradient, weight_N1)
    return loss_N, predicted_N, gradient


class HeadLoss(torch.autograd.Function):
    """Linear head and weighted loss in one, a block of rows at a time.

    Both gradients are computed on the way forward, while a block's probabilities are at hand, so neither
    logits nor probabilities are kept: 2 passes over [rows, Vd] fewer, and memory that does not grow with the
    batch.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_NH: torch.Tensor,
        head_VH: torch.Tensor,
        teacher: Teacher,
        teacher_head_VH: torch.Tensor | None,
        weight_N: torch.Tensor,
        dtype: torch.dtype,
        row_loss: RowLoss,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss (scalar: sum of weight times loss), loss [N], predicted draft id [N].

        ``teacher``: N rows. ``dtype``: of the matrix products.
        """
        head, hidden = head_VH.to(dtype), hidden_NH.to(dtype)
        teacher_head = None if teacher_head_VH is None else teacher_head_VH.to(dtype)
        loss_N = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        predicted_N = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=hidden.device)
        for at in range(0, len(hidden), ROWS_AT_ONCE):
            span = slice(at, at + ROWS_AT_ONCE)
            loss_N[span], predicted_N[span], gradient = row_loss(
                hidden[span] @ head.T, teacher.block(span, teacher_head), weight_N[span, None]
            )
            gradient = gradient.to(dtype)
            grad_hidden[span] = gradient @ head
            grad_head += gradient.T @ hidden[span]
        ctx.save_for_backward(grad_hidden.to(hidden_NH.dtype), grad_head.to(head_VH.dtype))
        ctx.mark_non_differentiable(loss_N, predicted_N)
        return (loss_N * weight_N).sum(), loss_N, predicted_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grads[0], grad_head * grads[0], None, None, None, None, None
