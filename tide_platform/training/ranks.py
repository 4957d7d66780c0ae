"""Training on several processes, started by ``torchrun``: every rank runs the same ``tide train``.

``replicate`` is DistributedDataParallel, ``shard`` FSDP2 (weights, gradients and moments in shards). Both
average gradients over ranks; the loss is multiplied by their number, for gradients must add up
(:mod:`tide_platform.training.world`). Whatever the loop has to agree on goes through a gloo group of its own
on the CPU, so no GPU is waited for; gradients go through NCCL (RCCL on ROCm) where there are GPUs.
"""

import copy
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tide_platform.config import TideError
from tide_platform.config.schema import Training
from tide_platform.training.world import Alone, PeerFailed, World

T = TypeVar("T")
log = logging.getLogger("tide.train")

# for what a rank may wait: a slow store on another one
_PATIENCE = timedelta(minutes=30)
# for gradients: all have agreed to begin the step
_GRADIENTS = timedelta(minutes=10)


class NoGpu(TideError):
    """``training.device: cuda`` where PyTorch sees none, or too few for the processes of this machine."""

    def __init__(self, wanted: int, seen: int):
        super().__init__(
            f"training.device is cuda and this machine runs {wanted} processes, PyTorch sees {seen} GPUs: "
            "start as many processes as there are GPUs (torchrun --nproc-per-node), or set training.device "
            "to cpu; a CPU build of PyTorch sees none (docs/training.md)"
        )
        self.wanted, self.seen = wanted, seen


@contextmanager
def joined(settings: Training, environ: Mapping[str, str] = os.environ) -> Iterator[World]:
    """The processes of this run: those that torchrun started together, else this one alone.

    Raises :class:`NoGpu`.
    """
    size = int(environ.get("WORLD_SIZE", "1"))
    local, beside = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _device(settings.device, local, beside)
    if size == 1:
        yield Alone(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_GRADIENTS)
    yield Ranks(device, settings.parallel)
    # not after an error: NCCL's end waits for ranks that wait for this one in turn; the process ends it
    dist.destroy_process_group()


def _device(wanted: Literal["auto", "cpu", "cuda"], local: int, beside: int) -> torch.device:
    seen = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and seen < beside):
        if seen > 0:
            log.warning("training on the CPU: %d processes here, and PyTorch sees %d GPUs", beside, seen)
        return torch.device("cpu")
    if seen < beside:
        raise NoGpu(beside, seen)
    return torch.device("cuda", local)


class Ranks:
    """All ranks of the default process group. Implements :class:`~tide_platform.training.world.World`."""

    def __init__(self, device: torch.device, parallel: Literal["replicate", "shard"]):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device, self._parallel = device, parallel
        self._control: Any = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def share(self, samples: Sequence[int]) -> Sequence[int]:
        """Every ``size``-th: a step's samples are in order of length, so all ranks have as much to do."""
        return samples[self.rank :: self.size]

    def total(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def most(self, value: int) -> int:
        return int(self._reduced([value], dist.ReduceOp.MAX)[0])

    def union(self, named: Mapping[str, str]) -> dict[str, str]:
        merged: dict[str, str] = {}
        for part in self._all(dict(named)):
            merged |= part
        return merged

    def agree(self, trouble: Exception | None) -> None:
        if not self.total([trouble is not None])[0]:
            return
        told = self._all(None if trouble is None else [type(trouble).__name__, str(trouble)])
        if isinstance(trouble, TideError):
            raise trouble
        if trouble is not None:  # as an error of the platform: what follows it, all ranks do together
            raise PeerFailed(self.rank, type(trouble).__name__, str(trouble)) from trouble
        rank = next(rank for rank, each in enumerate(told) if each)
        raise PeerFailed(rank, *told[rank])

    def led(self, action: Callable[[], T]) -> T:
        done: Any = None
        trouble: BaseException | None = None
        if self.rank == 0:
            try:
                done = action()
                json.dumps(done)
            except BaseException as error:  # noqa: BLE001 (raised below, once the others know)
                trouble = error
        failed = None if trouble is None else [type(trouble).__name__, str(trouble)]
        told = self._from_first({"failed": failed, "done": done if failed is None else None})
        if trouble is not None:
            raise trouble
        if told["failed"] is not None:
            raise PeerFailed(0, *told["failed"])
        return done if self.rank == 0 else told["done"]

    def handed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()}
        got: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in self._from_first(shapes).items():
            mine = tensors[name] if self.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(mine, 0, group=self._control)
            got[name] = mine
        return got

    def spread(self, objective: nn.Module) -> nn.Module:
        if self._parallel == "replicate":
            ids = [self.device] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(objective, device_ids=ids, broadcast_buffers=False)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sharded = copy.deepcopy(objective)  # the caller's stays whole; it gets the weights back at the end
        fully_shard(sharded, mesh=init_device_mesh(self.device.type, (self.size,)))
        return sharded

    def accumulating(self, objective: nn.Module, last: bool) -> AbstractContextManager[None]:
        if isinstance(objective, nn.parallel.DistributedDataParallel):
            return nullcontext() if last else objective.no_sync()
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(objective, FSDPModule)
        objective.set_requires_gradient_sync(last)
        return nullcontext()

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, how, group=self._control)
        return tensor.tolist()

    def _all(self, value: Any) -> list[Any]:
        """Every rank's value. As JSON: torch's own gathering of objects pickles."""
        mine = _encoded(value)
        own = torch.zeros(self.most(len(mine)), dtype=torch.uint8)
        own[: len(mine)] = mine
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self._control)
        return [json.loads(each.numpy().tobytes().rstrip(b"\0")) for each in found]

    def _from_first(self, value: Any) -> Any:
        mine = _encoded(value)
        length = self.most(len(mine) if self.rank == 0 else 0)
        data = mine if self.rank == 0 else torch.empty(length, dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        return json.loads(data.numpy().tobytes())


def _encoded(value: Any) -> torch.Tensor:
    """As JSON, uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
