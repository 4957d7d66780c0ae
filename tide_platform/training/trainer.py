"""The optimizer loop: plain torch, AdamW over fp32 masters, one process."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from tide_platform.config import TideError
from tide_platform.config.schema import Training
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.training.data import Example, collate, micro_batches, plan_epoch
from tide_platform.training.objective import DECAY, loss_and_stats

BETAS = (0.9, 0.95)
MAX_POSITIONS = 8192  # padded positions of a micro-batch


class LossNotFinite(TideError):
    """The loss is infinite or not a number."""

    def __init__(self, step: int, sample_ids: list[str]):
        super().__init__(
            f"the loss of step {step} is not finite (samples {', '.join(sample_ids[:4])} ...); "
            "lower training.learning_rate, or look at these samples with `tide samples show`"
        )
        self.step, self.sample_ids = step, sample_ids


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses in nats; accuracy: draft argmax equals the teacher's; both for each unroll
    step.
    """

    step: int  # from 1
    steps: int
    epoch: int  # from 0
    loss: float
    losses: list[float]
    accuracy: list[float]
    learning_rate: float
    grad_norm: float
    tokens: int  # response tokens seen so far
    seconds: float  # since the start

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def learning_rate(step: int, steps: int, settings: Training) -> float:
    """Linear warm-up to ``learning_rate``, then a cosine to ``min_lr_ratio`` of it; ``step`` from 0."""
    warmup = max(1, round(settings.warmup_ratio * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    low = settings.min_lr_ratio
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    draft: Eagle3Draft,
    embed_VH: torch.Tensor,
    examples: Sequence[Example],
    settings: Training,
    seed: int,
    on_step: Callable[[StepRecord], None] | None = None,
    device: torch.device | str = "cpu",
) -> list[StepRecord]:
    """Trains ``draft`` in place, ``settings.epochs`` times over the examples; one record a step.

    Raises :class:`LossNotFinite`.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(settings.threads)
    draft.to(device).train()
    embed_VH = embed_VH.to(device)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=settings.learning_rate, betas=BETAS, weight_decay=settings.weight_decay, fused=True
    )
    plan = [
        (epoch, step)
        for epoch in range(settings.epochs)
        for step in plan_epoch(examples, settings.batch_size, seed * 1000 + epoch)
    ]
    records: list[StepRecord] = []
    tokens, began = 0, time.monotonic()
    for number, (epoch, chosen) in enumerate(plan):
        rate = learning_rate(number, len(plan), settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        picked = [examples[i] for i in chosen]
        losses, accuracy = accumulate(draft, embed_VH, picked, settings)
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise LossNotFinite(number + 1, [e.sample_id for e in picked])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += sum(e.response_tokens for e in picked)
        records.append(
            StepRecord(
                number + 1,
                len(plan),
                epoch,
                sum(DECAY**j * x for j, x in enumerate(losses)),
                losses,
                accuracy,
                rate,
                float(norm),
                tokens,
                time.monotonic() - began,
            )
        )
        if on_step:
            on_step(records[-1])
    draft.eval()
    return records


def accumulate(
    draft: Eagle3Draft, embed_VH: torch.Tensor, examples: Sequence[Example], settings: Training
) -> tuple[list[float], list[float]]:
    """Adds the gradient of one optimizer step; returns mean loss and accuracy of each unroll step.

    N_j is counted over all the examples first, so the result does not depend on how they are split or padded.
    """
    steps = settings.unroll_steps
    counts = [sum(len(e.supervised[j]) for e in examples) for j in range(steps)]
    loss_sum, hit_sum = [0.0] * steps, [0] * steps
    for part in micro_batches(examples, MAX_POSITIONS):
        batch = collate(part).to(embed_VH.device)
        loss, stats = loss_and_stats(draft, embed_VH, batch, counts, settings.autocast)
        loss.backward()
        loss_sum = [a + b for a, b in zip(loss_sum, stats.loss, strict=True)]
        hit_sum = [a + b for a, b in zip(hit_sum, stats.hits, strict=True)]
    return [s / max(n, 1) for s, n in zip(loss_sum, counts, strict=True)], [
        h / max(n, 1) for h, n in zip(hit_sum, counts, strict=True)
    ]
