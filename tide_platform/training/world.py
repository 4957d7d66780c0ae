"""What an optimizer step shares with other processes: the one seam between the loop and their number.

The objective divides by N_j of the whole step, not by a process's own part, so gradients of all parts *add
up*. Whatever is global goes through a :class:`World`: which of a step's samples are this process's own, the
sums of counts and figures, the gradient's norm. A wrapper that averages gradients over its processes must
multiply by their number again. Which samples a step took, and so which are acknowledged with it, is the
plan's, the same in every process.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch


class World(Protocol):
    def share(self, samples: Sequence[int]) -> Sequence[int]:
        """This process's part of a step's samples; every sample is one process's own."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes of each value."""
        ...

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
        """Scales all gradients by one factor, such that their norm over all processes is at most
        ``max_norm``; the norm before.
        """
        ...


class Alone:
    """One process: all is its own."""

    def share(self, samples: Sequence[int]) -> Sequence[int]:
        return samples

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def clip(self, parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(list(parameters), max_norm))
