"""The memory that staging takes on a GPU and beside it, and the device as staging uses it.

Shapes: R rows of a slot, K log-probabilities a row, W = 3H, H hidden size.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tide_platform.engine.teacher import TeacherRows


class Arrival(Protocol):
    """The moment at which a copy is in host memory."""

    def synchronize(self) -> None: ...


class Device(Protocol):
    """What staging asks of a device; :class:`CudaDevice`, and a stand-in in the tests."""

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Pinned to device, on the current stream."""
        ...

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        """(pinned, device) pairs, after all that the current stream was given, beside what it gets next."""
        ...


class CudaDevice:
    def __init__(self, device: torch.device):
        self.device = device
        self._side = torch.cuda.Stream(device)

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
        made = torch.cuda.Event()
        made.record(torch.cuda.current_stream(self.device))
        arrived = torch.cuda.Event(blocking=True)  # its wait sleeps, without the interpreter's lock
        with torch.cuda.stream(self._side):
            self._side.wait_event(made)
            for host, staged in pairs:
                host.copy_(staged, non_blocking=True)
            arrived.record(self._side)
        return arrived


@dataclass(frozen=True)
class Shape:
    """Size of the staging memory: device and pinned each ``slots * rows * row_bytes``."""

    width: int  # 3H
    teacher_k: int
    rows: int  # of a slot
    slots: int
    last_width: int = 0  # H where last hidden states are captured

    @classmethod
    def of(
        cls, width: int, teacher_k: int, prefill_tokens: int, running: int, k: int, last_width: int = 0
    ) -> "Shape":
        """One whole prefill step, and four verify steps of all requests, at once on their way."""
        rows = max(512, running, k + 1)
        wanted = prefill_tokens + 4 * running * (k + 1)
        return cls(width, teacher_k, rows, max(4, -(-wanted // rows)), last_width)

    @property
    def bytes(self) -> int:
        row = 2 * (self.width + self.last_width) + self.teacher_k * 6 + 2 + 4 * 8
        return self.slots * self.rows * row


class Slot:
    """R rows: their device memory, the pinned memory of the same form, and what is gathered."""

    def __init__(self, shape: Shape, device: Device):
        forms = {
            "aux": ((shape.rows, shape.width), torch.bfloat16),
            "ids": ((shape.rows, shape.teacher_k), torch.int32),
            "logp": ((shape.rows, shape.teacher_k), torch.float16),
            "token_logp": ((shape.rows,), torch.float16),
            "last_hidden": ((shape.rows, shape.last_width), torch.bfloat16),
            "counts": ((shape.rows,), torch.int64),
            "starts": ((shape.rows,), torch.int64),
        }
        self.staged = {name: device.memory(*form) for name, form in forms.items()}
        self.host = {name: device.pinned(*form) for name, form in forms.items()}
        self.index_host = device.pinned((2, shape.rows), torch.int64)  # rows; places
        self.index = device.memory((2, shape.rows), torch.int64)

    def point(self, device: Device, which: int, numbers: Sequence[int]) -> torch.Tensor:
        """``numbers`` on the device."""
        size = len(numbers)
        self.index_host[which, :size].copy_(torch.tensor(numbers, dtype=torch.int64))
        device.upload(self.index[which, :size], self.index_host[which, :size])
        return self.index[which, :size]

    def pairs(self, **sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = [(self.host[name][:size], self.staged[name][:size]) for name, size in sizes.items()]
        return [(host, staged) for host, staged in parts if host.numel()]

    def aux(self, of: slice) -> np.ndarray:
        """uint16 bits of the host's rows; a view, of use until the slot is free again."""
        return self._bits("aux", of)

    def teacher(self, of: slice) -> TeacherRows:
        ids, logp, token_logp = (self.host[name][of].numpy() for name in ("ids", "logp", "token_logp"))
        return TeacherRows(ids, logp, token_logp, self._bits("last_hidden", of))

    def _bits(self, name: str, of: slice) -> np.ndarray:
        return self.host[name][of].view(torch.int16).numpy().view(np.uint16)


class Staging:
    """The memory. Made before SGLang sizes its KV cache, which takes what is left."""

    def __init__(self, shape: Shape, device: Device):
        self.shape, self.device = shape, device
        self._free = deque(Slot(shape, device) for _ in range(shape.slots))

    def take(self, count: int) -> list[Slot] | None:
        """``count`` slots, or none where fewer are free. Called by one thread; :meth:`give` by another."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def give(self, slots: Sequence[Slot]) -> None:
        self._free.extend(slots)


def gather(target: torch.Tensor, source: torch.Tensor, index: torch.Tensor) -> None:
    if source.dtype == target.dtype:
        torch.index_select(source, 0, index, out=target)
    else:
        target.copy_(source.index_select(0, index))
