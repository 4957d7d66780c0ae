"""The learning rate of each optimizer step. No torch: the schedule is arithmetic."""

import math

from tide_platform.config.schema import Training


def learning_rate(step: int, steps: int, settings: Training) -> float:
    """The rate of optimizer step ``step`` (from 0) of ``steps``.

    Linear warm-up over the first ``warmup_ratio`` of the steps, then ``lr_schedule``: ``constant`` stays at
    ``learning_rate``, ``cosine`` falls to ``min_lr_ratio`` of it (Loshchilov and Hutter 2017, one period).
    """
    warmup = max(1, round(settings.warmup_ratio * steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if settings.lr_schedule == "constant":
        return settings.learning_rate
    done = (step - warmup) / max(1, steps - warmup)
    low = settings.min_lr_ratio
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
