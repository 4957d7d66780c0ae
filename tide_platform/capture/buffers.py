"""Memory that samples are put together in: page-aligned, touched only where rows were written, used again.

Shapes: L rows of a stretch, K log-probabilities a row, H hidden size.
"""

import mmap

import numpy as np

from tide_platform.capture.record import StreamMeta

PAGE = mmap.PAGESIZE
_LARGE = 8 << 20  # bytes from which a buffer takes huge pages
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Buffer:
    """Room for the rows of one stretch, at the index of their position in it."""

    def __init__(self, stream: StreamMeta, length: int):
        layout = (
            ("aux", np.dtype(np.uint16), (length, 3 * stream.hidden_size)),
            ("teacher_ids", np.dtype(np.int32), (length, stream.teacher_k)),
            ("teacher_logp", np.dtype(np.float16), (length, stream.teacher_k)),
            ("token_logp", np.dtype(np.float16), (length,)),
            ("last_hidden", np.dtype(np.uint16), (length, stream.last_width)),
        )
        sizes = [-(-int(np.prod(shape)) * dtype.itemsize // PAGE) * PAGE for _, dtype, shape in layout]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        mapped = mmap.mmap(-1, sum(sizes), flags)
        if sum(sizes) >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):  # fewer faults, faster copies and writes
            mapped.madvise(mmap.MADV_HUGEPAGE)
        memory, at = np.frombuffer(mapped, np.uint8), 0
        self.arrays: dict[str, np.ndarray] = {}
        for (name, dtype, shape), size in zip(layout, sizes, strict=True):
            used = int(np.prod(shape)) * dtype.itemsize
            self.arrays[name] = memory[at : at + used].view(dtype).reshape(shape)
            at += size
        self._aux_row = self.arrays["aux"].strides[0]
        self._teacher_row = 6 * stream.teacher_k + 2 + 2 * stream.last_width
        self._rows = self._teachers = 0  # touched so far: index of the last one, plus one

    def touch(self, rows: int, teachers: int) -> None:
        """Rows below these indices are in memory from now on."""
        self._rows, self._teachers = max(self._rows, rows), max(self._teachers, teachers)

    @property
    def bytes(self) -> int:
        """Bytes of memory that it holds, about."""
        return self._rows * self._aux_row + self._teachers * self._teacher_row


class Pool:
    """Free buffers; beyond ``keep_bytes`` of them, one that comes back is given to the system."""

    def __init__(self, stream: StreamMeta, length: int, keep_bytes: int):
        self._stream, self._length, self._keep = stream, length, keep_bytes
        self._free: list[Buffer] = []
        self.bytes = 0  # of the free ones

    def take(self) -> Buffer:
        if not self._free:
            return Buffer(self._stream, self._length)
        buffer = self._free.pop()
        self.bytes -= buffer.bytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Nothing reads ``buffer`` any more."""
        if self.bytes + buffer.bytes <= self._keep:
            self._free.append(buffer)
            self.bytes += buffer.bytes
