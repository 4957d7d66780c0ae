"""The spool's end of the ring: records as they were written, each seen once."""

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.capture.ring import (
    ALIGN,
    CRC,
    CRC_OFFSET,
    DATA_OFFSET,
    HEADER,
    RECORD_MAGIC,
    Kind,
    Ring,
    RingUnusable,
    record_crc,
)
from tide_platform.config import TideError

log = logging.getLogger("tide.spool")


class RecordBroken(TideError):
    """Bytes of the ring that are no record; the reader stands behind them."""

    def __init__(self, path: Path, position: int, skipped: int):
        super().__init__(
            f"{path}: no whole record at position {position}, {skipped} bytes skipped; requests in flight "
            "are dropped and counted as ring_broken, check the machine's memory and disk"
        )
        self.path, self.position, self.skipped = path, position, skipped


@dataclass(frozen=True)
class Record:
    """One record; its arrays are views of the ring, valid until the reader advances past it."""

    kind: Kind
    serial: int  # one for each captured request, unique in a ring
    seq: int  # 0, 1, 2, … within a request: a reader that misses one knows it
    end: int  # position after the record
    pos: int
    aux: np.ndarray  # uint16 [R, 3H]
    teacher_pos: int
    teacher_ids: np.ndarray  # int32 [M, K]
    teacher_logp: np.ndarray  # float16 [M, K]
    token_logp: np.ndarray  # float16 [M]
    last_hidden: np.ndarray  # uint16 [M, W], W = 0 where the stream has none
    tokens_pos: int
    tokens: np.ndarray  # int32 [T]
    content: dict[str, Any] = field(default_factory=dict)  # of a record that carries JSON


class RingReader:
    """The spool's end: :meth:`peek` at the next record, take what it holds, then :meth:`advance`.

    :meth:`peek` raises :class:`RecordBroken` once for a stretch of bytes that is no record, and goes on
    behind it at the next call; :class:`RingUnusable` once for a damaged head.
    """

    def __init__(self, ring: Ring):
        self.ring = ring
        self._tail = ring.tail
        self.gave_up = False  # unread records were lost, nobody knows how many
        self._damaged: int | None = None  # a head that was reported already
        if not self._plausible(ring.head) or self._tail % ALIGN:
            # a damaged tail: unread records cannot be told from old ones
            self._tail = ring.tail = ring.head - ring.head % ALIGN
            self.gave_up = True
            log.error("%s: a damaged tail, its unread records are given up", ring.path)

    def peek(self) -> Record | None:
        """The next record, ``None`` where the ring is empty."""
        head = self.ring.head
        if not self._plausible(head):
            return self._wait(head)
        while self._tail < head:
            start = self._tail
            record = self._record(start, head)
            if record is None:
                self._resync(start, head)
            elif record.kind != Kind.PAD:
                return record
            else:
                self.advance(record)
        return None

    def advance(self, record: Record) -> None:
        """Frees the record's room."""
        self._move(record.end)

    def _move(self, tail: int) -> None:
        self._tail = self.ring.tail = tail

    def _plausible(self, head: int) -> bool:
        return self._tail <= head <= self._tail + self.ring.capacity and head % ALIGN == 0

    def _wait(self, head: int) -> None:
        """A damaged head mends itself: the writer stores its own again with its next record."""
        if head != self._damaged:
            self._damaged = head
            raise RingUnusable(self.ring.path, f"its head {head} does not fit its tail {self._tail}")

    def _resync(self, start: int, head: int) -> None:
        """The next place where a record stands whole, or the head."""
        at = start + ALIGN
        while at < head and self._record(at, head) is None:
            at += ALIGN
        self._move(at)
        raise RecordBroken(self.ring.path, start, at - start)

    def _record(self, start: int, head: int) -> Record | None:
        ring = self.ring
        offset = start % ring.capacity
        magic, number, length, seq, serial, position, pos, rows, teacher_pos, teachers, *rest = (
            HEADER.unpack_from(ring.memory, DATA_OFFSET + offset)
        )
        tokens_pos, tokens, encoded = rest
        if magic != RECORD_MAGIC or position != start or number not in _KINDS or length % ALIGN:
            return None
        kind = Kind(number)
        if not ALIGN <= length <= min(head - start, ring.capacity - offset):
            return None
        (crc,) = CRC.unpack_from(ring.memory, DATA_OFFSET + offset + CRC_OFFSET)
        if crc != record_crc(ring.data, offset, ALIGN if kind == Kind.PAD else length):
            return None
        width, k = 3 * ring.stream.hidden_size, ring.stream.teacher_k
        at = offset + ALIGN

        def take(dtype: np.dtype, *shape: int) -> np.ndarray:
            nonlocal at
            size = math.prod(shape) * dtype.itemsize
            view = ring.data[at : at + size].view(dtype).reshape(shape)
            at += size
            return view

        return Record(
            kind,
            serial,
            seq,
            start + length,
            pos,
            take(_U16, rows, width),
            teacher_pos,
            take(_I32, teachers, k),
            take(_F16, teachers, k),
            take(_F16, teachers),
            take(_U16, teachers, ring.stream.last_width),
            tokens_pos,
            take(_I32, tokens),
            json.loads(take(_U8, encoded).tobytes()) if encoded else {},
        )


_U8, _U16, _I32, _F16 = map(np.dtype, ("u1", "u2", "i4", "f2"))
_KINDS = frozenset(int(kind) for kind in Kind)
