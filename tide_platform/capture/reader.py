"""The spool's end of the ring: records as they were written, each seen once."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide_platform.capture.record import SampleMeta
from tide_platform.capture.ring import ALIGN, DATA_OFFSET, HEADER, RECORD_MAGIC, Kind, Ring, RingUnusable


@dataclass(frozen=True)
class Record:
    """One record; its arrays are views of the ring, valid until the reader advances past it."""

    kind: Kind
    serial: int  # one for each captured request, unique in a ring
    seq: int  # 0, 1, 2, … within a request: a reader that misses one knows it
    end: int  # position after the record
    pos: int = 0
    aux: np.ndarray | None = None  # uint16 [R, 3H]
    teacher_pos: int = 0
    teacher_ids: np.ndarray | None = None  # int32 [M, K]
    teacher_logp: np.ndarray | None = None  # float16 [M, K]
    token_logp: np.ndarray | None = None  # float16 [M]
    meta: SampleMeta | None = None
    input_ids: np.ndarray | None = None  # int32 [T]
    reason: str = ""


class RingReader:
    """The spool's end: :meth:`peek` at the next record, take what it holds, then :meth:`advance`."""

    def __init__(self, ring: Ring):
        self.ring = ring

    def peek(self) -> Record | None:
        """The next record, ``None`` where the ring is empty. Raises :class:`RingUnusable` on others."""
        ring = self.ring
        while ring.tail < ring.head:
            start = ring.tail
            offset = start % ring.capacity
            magic, kind, _, length, *fields = HEADER.unpack_from(ring.memory, DATA_OFFSET + offset)
            if magic != RECORD_MAGIC or not ALIGN <= length <= min(ring.head - start, ring.capacity - offset):
                raise RingUnusable(ring.path, f"no record at position {start}")
            if kind == Kind.PAD:
                ring.tail = start + length
                continue
            return self._record(Kind(kind), start + length, offset + ALIGN, fields)
        return None

    def advance(self, record: Record) -> None:
        """Frees the record's room."""
        self.ring.tail = record.end

    def skip_all(self) -> None:
        """Gives up whatever is unread: the way on after a broken record."""
        self.ring.tail = self.ring.head

    def _record(self, kind: Kind, end: int, offset: int, fields: list[Any]) -> Record:
        seq, serial, pos, rows, teacher_pos, teachers, meta_bytes, tokens, reason = fields
        stream = self.ring.stream

        def take(dtype: Any, *shape: int) -> np.ndarray:
            nonlocal offset
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            view = self.ring.data[offset : offset + size].view(dtype).reshape(shape)
            offset += size
            return view

        if kind == Kind.DISCARD:
            return Record(kind, serial, seq, end, reason=reason.rstrip(b"\0").decode())
        if kind == Kind.FINISH:
            ids = take(np.int32, tokens)
            meta = SampleMeta.from_json(json.loads(take(np.uint8, meta_bytes).tobytes()))
            return Record(kind, serial, seq, end, meta=meta, input_ids=ids)
        return Record(
            kind,
            serial,
            seq,
            end,
            pos,
            take(np.uint16, rows, 3 * stream.hidden_size),
            teacher_pos,
            take(np.int32, teachers, stream.teacher_k),
            take(np.float16, teachers, stream.teacher_k),
            take(np.float16, teachers),
        )
