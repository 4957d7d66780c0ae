"""EAGLE3's objective (design 4.3): a loss of each unroll step, over the draft's vocabulary.

Loss = sum over steps j of ``DECAY**j / N_j`` times the sum over supervised positions of the row loss, N_j the
number of supervised positions of step j in the whole optimizer step (over micro-batches); a step with
N_j = 0 is left out. What a row is punished by is :mod:`tide_platform.training.losses`'s, what it learns from
:mod:`tide_platform.training.teacher`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tide_platform.draft.eagle3 import Eagle3Draft, Unroll
from tide_platform.draft.layout import Packed
from tide_platform.training.data import Batch
from tide_platform.training.losses import HeadLoss, RowLoss, soft_cross_entropy
from tide_platform.training.teacher import LastHidden, MissingTeacher

DECAY = 0.8


@dataclass(frozen=True)
class StepStats:
    """Sums over supervised positions, for each unroll step."""

    loss: list[float]  # of the row loss, nats
    hits: list[int]  # draft argmax == teacher argmax
    count: list[int]


def unroll_steps(draft: Eagle3Draft, embed_VH: torch.Tensor, batch: Batch, steps: int) -> list[torch.Tensor]:
    """Un-normed hidden states [1, Q, H] of each step, teacher-forced with the sample's own tokens.

    Q roots: those of each example, one example after the other.
    """
    layout = Packed(batch.positions_1P, batch.key_mask_1P, batch.contexts, batch.roots)
    unroll = Unroll.packed(draft, layout)
    hidden = [unroll.first(F.embedding(batch.next_token_1P, embed_VH), batch.aux_1PF)]
    for j in range(1, steps):
        embeds = F.embedding(batch.later_token_1QS[:, :, j - 1], embed_VH)
        hidden.append(unroll.next(embeds, hidden[-1]))
    return hidden


def loss_and_stats(
    draft: Eagle3Draft,
    embed_VH: torch.Tensor,
    batch: Batch,
    counts: Sequence[int],
    autocast: bool = False,
    teacher_head_VH: torch.Tensor | None = None,
    row_loss: RowLoss = soft_cross_entropy,
) -> tuple[torch.Tensor, StepStats]:
    """The batch's share of the loss. ``counts``: N_j over the whole optimizer step, not of this batch alone.

    ``autocast``: matrix products in bf16; residual, norms, softmax and loss stay fp32. ``teacher_head_VH``:
    :func:`~tide_platform.training.teacher.restricted_head` of the target, for examples whose teacher is the
    last hidden state. Raises :class:`MissingTeacher` where it is needed and not given.
    """
    if isinstance(batch.teacher, LastHidden) and teacher_head_VH is None:
        raise MissingTeacher(f"sample {batch.sample_ids[0]}", "no target head was given")
    steps = len(counts)
    device = embed_VH.device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = unroll_steps(draft, embed_VH, batch, steps)
    picked = [h[0].index_select(0, i) for h, i in zip(hidden, batch.root_index, strict=True)]
    normed_NH = draft.norm(torch.cat(picked))
    teacher = batch.teacher.take(torch.cat(batch.teacher_index))
    weights = [
        torch.full((len(i),), DECAY**j / max(n, 1), device=device)
        for j, (i, n) in enumerate(zip(batch.root_index, counts, strict=True))
    ]
    dtype = torch.bfloat16 if autocast else normed_NH.dtype
    loss, loss_N, predicted_N = HeadLoss.apply(
        normed_NH, draft.lm_head.weight, teacher, teacher_head_VH, torch.cat(weights), dtype, row_loss
    )  # type: ignore[misc]
    hit_N = predicted_N == teacher.best_M
    sizes = batch.counts
    return loss, StepStats(
        loss=[float(x.sum()) for x in loss_N.split(sizes)],
        hits=[int(x.sum()) for x in hit_N.split(sizes)],
        count=sizes,
    )


class Objective(nn.Module):
    """The loss as a module, so that several processes can share its gradient.

    ``embed_VH``, ``teacher_head_VH``: the target's, frozen, and neither parameters nor buffers of this.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        embed_VH: torch.Tensor,
        autocast: bool,
        teacher_head_VH: torch.Tensor | None = None,
    ):
        super().__init__()
        self.draft, self.autocast = draft, autocast
        self._frozen = _Frozen(embed_VH, teacher_head_VH)

    def forward(self, batch: Batch | None, counts: Sequence[int]) -> tuple[torch.Tensor, StepStats]:
        """:func:`loss_and_stats` of the batch. None: no examples, a loss of 0 whose gradient is 0 everywhere,
        for a process that has nothing left to do while others have.
        """
        if batch is None:
            nothing = StepStats([0.0] * len(counts), [0] * len(counts), [0] * len(counts))
            return torch.stack([p.sum() * 0 for p in self.draft.parameters()]).sum(), nothing
        frozen = self._frozen
        batch = batch.to(frozen.embed_VH.device)
        return loss_and_stats(
            self.draft, frozen.embed_VH, batch, counts, self.autocast, frozen.teacher_head_VH
        )


@dataclass(frozen=True)
class _Frozen:
    """Held apart from the module's own tensors: not moved, sharded or copied with them."""

    embed_VH: torch.Tensor
    teacher_head_VH: torch.Tensor | None

    def __deepcopy__(self, memo: object) -> "_Frozen":
        return self
