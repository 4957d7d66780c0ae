"""What an optimizer step shares with other processes: the one seam between the loop and their number.

The objective divides by N_j of the whole step, not by a process's own part, so gradients of all parts *add
up*. Whatever is global goes through a :class:`World`: which of a step's samples are this process's own, the
sums of counts and figures, the gradient, and whether all go on. Which samples a step took, and
so which are acknowledged with it, is the plan's, the same in every process.

Every method but ``share`` is called by all processes, in the same order: one that is not waits for the
others.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch
from torch import nn

from tide_platform.config import TideError

T = TypeVar("T")


class PeerFailed(TideError):
    """Another process of this run could not go on."""

    def __init__(self, rank: int, kind: str, text: str):
        super().__init__(f"process {rank} of this run: {text}")
        self.rank, self.kind, self.text = rank, kind, text


class World(Protocol):
    rank: int
    size: int
    device: torch.device

    def share(self, samples: Sequence[int]) -> Sequence[int]:
        """This process's part of a step's samples; every sample is one process's own."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes of each value."""
        ...

    def most(self, value: int) -> int:
        """The largest of all processes' values."""
        ...

    def union(self, named: Mapping[str, str]) -> dict[str, str]:
        """All processes' entries."""
        ...

    def agree(self, trouble: Exception | None) -> None:
        """Returns where no process is in trouble. Else raises in all of them: one's own, or
        :class:`PeerFailed`.
        """
        ...

    def led(self, action: Callable[[], T]) -> T:
        """What ``action``, of JSON, gives in process 0, the only one that calls it; what it raises there is
        :class:`PeerFailed` in the others.
        """
        ...

    def handed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Process 0's tensors (CPU); what the others give is not looked at."""
        ...

    def spread(self, objective: nn.Module) -> nn.Module:
        """The module that computes gradients of all processes. Its parameters are the ones to optimize."""
        ...

    def accumulating(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch. Gradients are summed over processes with the ``last`` of a step."""
        ...


class Alone:
    """One process: all is its own."""

    rank, size = 0, 1

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)

    def share(self, samples: Sequence[int]) -> Sequence[int]:
        return samples

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def most(self, value: int) -> int:
        return value

    def union(self, named: Mapping[str, str]) -> dict[str, str]:
        return dict(named)

    def agree(self, trouble: Exception | None) -> None:
        if trouble is not None:
            raise trouble

    def led(self, action: Callable[[], T]) -> T:
        return action()

    def handed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(tensors)

    def spread(self, objective: nn.Module) -> nn.Module:
        return objective

    def accumulating(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


def together(world: World, action: Callable[[], T]) -> T:
    """What ``action`` gives in each process, once it has succeeded in all of them; raises as
    :meth:`World.agree` does.
    """
    done: list[T] = []
    trouble: Exception | None = None
    try:
        done.append(action())
    except Exception as error:  # noqa: BLE001 (raised below, once the others know)
        trouble = error
    world.agree(trouble)
    return done[0]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded over processes (a DTensor): all of them call this."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def sharded_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's shard of ``tensor``, which all have whole, where ``like`` is sharded."""
    if not hasattr(like, "full_tensor"):
        return tensor.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
