"""The server's end of the ring. It lives on SGLang's scheduler thread, so it never waits and never raises on
a full ring: what does not fit is dropped as a whole sample and counted.

Shapes: R rows, M teacher rows, K log-probabilities a row, H hidden size, T tokens, W columns of the last
hidden state (H, or 0 where the stream has none).
"""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tide_platform.capture.record import SampleMeta
from tide_platform.capture.ring import (
    ALIGN,
    CRC,
    CRC_OFFSET,
    DATA_OFFSET,
    HEADER,
    RECORD_MAGIC,
    RESERVED,
    Kind,
    Ring,
    record_crc,
)

_RECORD_BYTES = 1 << 20
NO_TOKENS = np.zeros(0, np.int32)


@dataclass
class _Open:
    """A request between :meth:`RingWriter.begin` and its end."""

    serial: int
    start: int
    next_token: int  # position of the first token that is not confirmed
    seq: int = 0
    rows: int = 0


class _Part(NamedTuple):
    """One record: numbers of its header in order, and the arrays of its body."""

    kind: Kind
    arrays: tuple[np.ndarray, ...] = ()
    pos: int = 0
    rows: int = 0
    teacher_pos: int = 0
    teachers: int = 0
    tokens_pos: int = 0
    tokens: int = 0
    json_bytes: int = 0


class RingWriter:
    """What the capture hooks call. Returns ``False`` where the sample was dropped; never blocks.

    A request is one :meth:`begin`, any number of :meth:`write` and :meth:`update`, then one :meth:`finish` or
    :meth:`discard`. Rows of a position that was written before replace it (a retracted request is prefilled
    again), unless its stretch has left the spool.
    """

    def __init__(self, ring: Ring):
        self.ring = ring
        self.dropped: dict[str, int] = {}  # reason -> samples
        self.samples = self.rows = self.bytes = 0  # finished, written; bytes put into the ring
        self._head = ring.head
        self._open: dict[str, _Open] = {}
        self._dead: set[str] = set()  # dropped, its finish or discard still to come
        self._pending: deque[tuple[_Open, str]] = deque()  # discards that found no room, their reasons
        self._slots: dict[str, int] = {}
        self._serial = 0
        self._width = 3 * ring.stream.hidden_size
        self._k, self._last = ring.stream.teacher_k, ring.stream.last_width
        # bytes of a record at most: padding wastes little, and the spool works in its cache
        self._piece = min(ring.capacity // 16, _RECORD_BYTES)

    @property
    def capacity(self) -> int:
        """Bytes of the ring."""
        return self.ring.capacity

    def ring_used_bytes(self) -> int:
        """Bytes that the spool has not consumed yet."""
        return min(max(0, self._head - self.ring.tail), self.ring.capacity)

    def count(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        slot = self._slots.setdefault(reason, len(self._slots))
        self.ring.count_lost(slot, reason, self.dropped[reason])

    def begin(self, rid: str, meta: SampleMeta) -> bool:
        """A request is captured from here on. ``meta``: what is known now; ``start_pos`` is the first
        position that is kept.
        """
        if rid in self._open:  # the caller never ended the former one
            self._drop(rid, "malformed")
        self._dead.discard(rid)
        self._serial += 1
        self._open[rid] = _Open(self._serial, meta.start_pos, meta.start_pos)
        return self._publish(rid, [_json(Kind.BEGIN, meta.to_json())])

    def write(
        self,
        rid: str,
        pos: int,
        aux: np.ndarray,
        teacher_pos: int,
        teacher_ids: np.ndarray,
        teacher_logp: np.ndarray,
        token_logp: np.ndarray,
        tokens_pos: int = 0,
        tokens: np.ndarray = NO_TOKENS,
        last_hidden: np.ndarray | None = None,
    ) -> bool:
        """Rows of request ``rid``, copied before the call returns.

        ``aux`` uint16 [R, 3H] (bf16 bits) are rows pos … pos+R-1; ``teacher_ids`` int32 [M, K],
        ``teacher_logp`` float16 [M, K] and ``token_logp`` float16 [M] (NaN: no token) are teacher rows from
        ``teacher_pos``, as is ``last_hidden`` uint16 [M, H] (bf16 bits), which a stream of that signal must
        have; ``tokens`` int32 [T] are confirmed ones from ``tokens_pos``, contiguous with those
        given before (the first at ``start_pos``). R, M or T may be 0, and tokens may lag behind the rows.
        Arrays of other shapes and tokens elsewhere drop the sample as ``malformed``.
        """
        if rid in self._dead:
            return False
        entry = self._open.get(rid)
        aux = np.ascontiguousarray(aux)
        ids = np.ascontiguousarray(teacher_ids, np.int32)
        logp = np.ascontiguousarray(teacher_logp, np.float16)
        token = np.ascontiguousarray(token_logp, np.float16)
        given = np.ascontiguousarray(tokens, np.int32)
        last = np.ascontiguousarray(
            np.empty((len(token), 0), np.uint16) if last_hidden is None else last_hidden
        )
        shape = (len(token), self._k)
        if aux.dtype != np.uint16 or aux.ndim != 2 or aux.shape[1] != self._width:
            return self._drop(rid, "malformed")
        if ids.shape != shape or logp.shape != shape or token.ndim != 1 or given.ndim != 1:
            return self._drop(rid, "malformed")
        if last.dtype != np.uint16 or last.shape != (len(token), self._last):
            return self._drop(rid, "malformed")
        if entry is None or (len(given) and tokens_pos != entry.next_token):
            return self._drop(rid, "malformed")
        body = (aux, ids, logp, token, last, given)
        if sum(part.nbytes for part in body) <= self._piece:
            numbers = pos, len(aux), teacher_pos, len(token), tokens_pos, len(given)
            parts = [_Part(Kind.ROWS, body, *numbers)]
        else:
            parts = self._rows(pos, aux, teacher_pos, (ids, logp, token, last))
            parts = self._with_tokens(parts, tokens_pos, given)
        if not self._publish(rid, parts):
            return False
        entry.next_token += len(given)
        entry.rows += len(aux)
        self.rows += len(aux)
        return True

    def update(self, rid: str, **changed: Any) -> None:
        """What became known later: ``draft_version_end``, ``k``, ``flags`` (added to those there are)."""
        if rid in self._dead:
            return
        if rid not in self._open:
            self._drop(rid, "malformed")
        else:
            self._publish(rid, [_json(Kind.UPDATE, changed)])

    def finish(self, rid: str, meta: SampleMeta, tokens_pos: int, tokens: np.ndarray) -> bool:
        """The request's end: its final ``meta`` and the tail of its tokens, int32 [T] from ``tokens_pos``.

        The sample ends at ``tokens_pos + T``: the spool cuts rows and tokens beyond. ``tokens_pos`` may lie
        before the tokens confirmed so far, never behind them. ``meta.start_pos`` and ``num_tokens`` are the
        spool's to fill in.
        """
        if rid in self._dead:
            self._dead.discard(rid)
            return False
        entry = self._open.get(rid)
        if entry is None or not entry.rows:
            self.discard(rid, "no_rows")
            return False
        tail = np.ascontiguousarray(tokens, np.int32)
        if tail.ndim != 1 or not entry.start <= tokens_pos <= entry.next_token:
            self.discard(rid, "malformed")
            return False
        step = max(1, self._piece // tail.itemsize)
        parts = self._with_tokens([], tokens_pos, tail) if len(tail) > step else []
        if parts:  # all of it is confirmed before the end says so
            tokens_pos, tail = tokens_pos + len(tail), NO_TOKENS
        end = _json(Kind.FINISH, meta.to_json())
        parts.append(end._replace(arrays=(tail, *end.arrays), tokens_pos=tokens_pos, tokens=len(tail)))
        if not self._publish(rid, parts):
            self._dead.discard(rid)
            return False
        del self._open[rid]
        self.samples += 1
        return True

    def discard(self, rid: str, reason: str) -> None:
        """Gives the request's sample up (aborted, opt_out, sampled_out, …) and counts it by reason, once."""
        if rid in self._dead:
            self._dead.discard(rid)
            return
        self._drop(rid, reason)
        self._dead.discard(rid)

    def _drop(self, rid: str, reason: str) -> bool:
        entry = self._open.pop(rid, None)
        self._dead.add(rid)
        self.count(reason)
        if entry and entry.seq:  # records of it are with the spool
            self._pending.append((entry, reason))
            self._flush()
        return False

    def _flush(self) -> bool:
        """Sends the discards that wait; they go before anything else, in order."""
        while self._pending:
            entry, reason = self._pending[0]
            if not self._place(entry, [_json(Kind.DISCARD, {"reason": reason})], reserve=0):
                return False
            self._pending.popleft()
        return True

    def _publish(self, rid: str, parts: list[_Part]) -> bool:
        return (self._flush() and self._place(self._open[rid], parts, RESERVED)) or self._drop(
            rid, "ring_full"
        )

    def _rows(
        self,
        pos: int,
        aux: np.ndarray,
        teacher_pos: int,
        teacher: tuple[np.ndarray, ...],
    ) -> list[_Part]:
        parts = []
        for row, rows, first, teachers in self._pieces(len(aux), len(teacher[0])):
            arrays = (aux[row : row + rows], *(part[first : first + teachers] for part in teacher))
            parts.append(_Part(Kind.ROWS, arrays, pos + row, rows, teacher_pos + first, teachers))
        return parts

    def _with_tokens(self, parts: list[_Part], tokens_pos: int, tokens: np.ndarray) -> list[_Part]:
        """Tokens go into the last record of rows; many of them into records of their own."""
        step = max(1, self._piece // tokens.itemsize)
        if parts and len(tokens) <= step // 4:
            last = parts.pop()
            arrays = (*last.arrays, tokens)
            return [*parts, last._replace(arrays=arrays, tokens_pos=tokens_pos, tokens=len(tokens))]
        for first in range(0, len(tokens), step):
            piece = tokens[first : first + step]
            parts.append(_Part(Kind.ROWS, (piece,), tokens_pos=tokens_pos + first, tokens=len(piece)))
        return parts

    def _pieces(self, rows: int, teachers: int) -> Iterator[tuple[int, int, int, int]]:
        """Splits a write so that no record is longer than a piece: (row, rows, teacher row, teacher rows)."""
        row_bytes, teacher_bytes = 2 * self._width, 6 * self._k + 2 + 2 * self._last
        # teachers first: a row shows the spool that the stretch before it is complete
        step = max(1, self._piece // teacher_bytes)
        for first in range(0, teachers, step):
            yield 0, 0, first, min(step, teachers - first)
        step = max(1, self._piece // row_bytes)
        for row in range(0, rows, step):
            yield row, min(step, rows - row), 0, 0

    def _place(self, entry: _Open, parts: list[_Part], reserve: int) -> bool:
        """Writes all records or none; moves ``head`` once, at the end."""
        ring, head = self.ring, self._head
        tail = ring.tail
        if not head - ring.capacity <= tail <= head:  # damaged: as good as full until the spool mends it
            return False
        limit = tail + ring.capacity - reserve
        places = []
        for part in parts:
            length = ALIGN + sum(array.nbytes for array in part.arrays)
            length += -length % ALIGN
            room = ring.capacity - head % ring.capacity
            pad = room if room < length else 0
            places.append((head, pad, length, part))
            head += pad + length
        if head > limit:
            return False
        for start, pad, length, part in places:
            if pad:
                self._record(start, pad, _Part(Kind.PAD), _PADDING)
                start += pad
            self._record(start, length, part, entry)
            entry.seq += 1
        self.bytes += head - self._head
        self._head = ring.head = head
        return True

    def _record(self, start: int, length: int, part: _Part, entry: _Open) -> None:
        ring = self.ring
        offset = start % ring.capacity
        kind, arrays, *numbers = part
        HEADER.pack_into(
            ring.memory,
            DATA_OFFSET + offset,
            RECORD_MAGIC,
            kind,
            length,
            entry.seq,
            entry.serial,
            start,
            *numbers,
        )
        at = DATA_OFFSET + offset + ALIGN
        for array in arrays:
            # by the mapping: half the time of a numpy view of the target, for rows of a round
            ring.memory[at : at + array.nbytes] = array.data
            at += array.nbytes
        checked = ALIGN if kind == Kind.PAD else length
        CRC.pack_into(ring.memory, DATA_OFFSET + offset + CRC_OFFSET, record_crc(ring.data, offset, checked))


_PADDING = _Open(0, 0, 0)


def _json(kind: Kind, content: dict[str, Any]) -> _Part:
    encoded = np.frombuffer(json.dumps(content).encode(), np.uint8)
    return _Part(kind, (encoded,), json_bytes=len(encoded))
