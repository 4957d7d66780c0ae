"""The ring between the server's scheduler and the spool: one mapped file, one writer, one reader.

The writer lives on SGLang's scheduler thread, so it never waits and never raises on a full ring: what does
not fit is dropped as a whole sample and counted. The file outlives both processes; positions stand in its
header, so a spool that was killed goes on where the dead one stopped (see ``spool.py`` for what that
costs).

Layout (little endian)::

    0       magic, capacity, epoch, length of the stream's JSON
    64      head: bytes ever written      (the writer's)      each on its own cache line
    128     tail: bytes ever consumed     (the spool's)
    192     heartbeat of the spool (Unix seconds), its pid
    4096    StreamMeta as JSON
    65536   data: records, 64-byte aligned, contiguous; a PAD record fills what is left before the end

A record becomes visible when ``head`` moves past it, an aligned 8-byte store. x86-64 keeps the order of
stores; a CPU that does not would need a fence there.

Shapes: R rows, M teacher rows, K log-probabilities a row, H hidden size, T tokens.
"""

import contextlib
import json
import mmap
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.capture.record import SampleMeta, StreamMeta
from tide_platform.config import TideError

MAGIC = b"TIDERNG1"
RECORD_MAGIC = 0x54494445
DATA_OFFSET = 1 << 16
STREAM_OFFSET = 4096
ALIGN = 64
# kept free of rows, so that a discard finds room in a ring that rows have filled
RESERVED = 64 * ALIGN
_HEAD, _TAIL, _BEAT, _PID = 64 // 8, 128 // 8, 192 // 8, 200 // 8
FILE_HEADER = struct.Struct("<8sQQI")
# magic kind flags length seq serial pos rows teacher_pos teacher_rows meta_bytes tokens reason
HEADER = struct.Struct("<IHHIIQiIiIII16s")
assert HEADER.size == ALIGN


class Kind(IntEnum):
    ROWS = 1
    FINISH = 2
    DISCARD = 3
    PAD = 4


class RingUnusable(TideError):
    """The ring's file is absent, of another format, or holds something that is no record."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path}: {what}; restart the server, which makes a new ring")
        self.path, self.what = path, what


class Ring:
    """The mapped file. :meth:`create` is the server's, :meth:`open` the spool's."""

    def __init__(self, path: Path, memory: mmap.mmap, inode: int):
        magic, self.capacity, self.epoch, length = FILE_HEADER.unpack_from(memory, 0)
        if magic != MAGIC or len(memory) != DATA_OFFSET + self.capacity:
            raise RingUnusable(path, "not a ring of this release")
        self.path, self.inode, self.memory = path, inode, memory
        self.stream = StreamMeta.from_json(json.loads(memory[STREAM_OFFSET : STREAM_OFFSET + length]))
        self._words = np.frombuffer(memory, np.uint64, DATA_OFFSET // 8)
        self._clock = self._words.view(np.float64)
        self.data = np.frombuffer(memory, np.uint8, self.capacity, DATA_OFFSET)

    @classmethod
    def create(cls, path: Path | str, bytes: int, stream: StreamMeta) -> "Ring":
        """A new ring of about ``bytes`` data bytes at ``path``, its pages already touched.

        A ring that is there already is set aside as ``<name>.left-<epoch>`` when records in it are unread (a
        spool drains those first), else replaced.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        capacity = bytes // ALIGN * ALIGN
        if capacity < 16 * RESERVED:
            raise RingUnusable(path, f"{bytes} bytes are too few, {16 * RESERVED} is the least")
        encoded = json.dumps(stream.to_json()).encode()
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, DATA_OFFSET + capacity)
            memory = mmap.mmap(file.fileno(), DATA_OFFSET + capacity)
            inode = os.fstat(file.fileno()).st_ino
        # a page fault on the scheduler's thread costs ten times the copy itself
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
        memory[STREAM_OFFSET : STREAM_OFFSET + len(encoded)] = encoded
        FILE_HEADER.pack_into(memory, 0, MAGIC, capacity, secrets.randbits(63), len(encoded))
        _set_aside(path)
        temporary.rename(path)
        return cls(path, memory, inode)

    @classmethod
    def open(cls, path: Path | str) -> "Ring":
        """Raises :class:`RingUnusable` where there is none."""
        path = Path(path)
        try:
            with path.open("r+b") as file:
                size, inode = os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_ino
                if size <= DATA_OFFSET:
                    raise RingUnusable(path, "not a ring of this release")
                return cls(path, mmap.mmap(file.fileno(), size), inode)
        except FileNotFoundError as error:
            raise RingUnusable(path, "no ring there") from error

    @property
    def head(self) -> int:
        return int(self._words[_HEAD])

    @head.setter
    def head(self, position: int) -> None:
        self._words[_HEAD] = position

    @property
    def tail(self) -> int:
        return int(self._words[_TAIL])

    @tail.setter
    def tail(self, position: int) -> None:
        self._words[_TAIL] = position

    def beat(self) -> None:
        """The spool says that it lives."""
        self._clock[_BEAT] = time.time()
        self._words[_PID] = os.getpid()

    def spool_age(self) -> float:
        """Seconds since the spool last said that it lives; infinite where none ever did."""
        beat = float(self._clock[_BEAT])
        return time.time() - beat if beat else float("inf")

    def close(self) -> None:
        """Drops the mapping as soon as no view of it is left (a mapping cannot go before its views)."""
        del self._words, self._clock, self.data
        with contextlib.suppress(BufferError):
            self.memory.close()


def _set_aside(path: Path) -> None:
    """Keeps a former ring's unread records for the spool."""
    try:
        former = Ring.open(path)
    except (RingUnusable, ValueError):
        return
    if former.head != former.tail:
        path.rename(path.with_name(f"{path.name}.left-{former.epoch:016x}"))
    former.close()


class RingWriter:
    """What the capture hooks call. Returns ``False`` where the sample was dropped; never blocks.

    A request is a sequence of :meth:`write`, then one :meth:`finish` or :meth:`discard`. Rows of a position
    that was written before replace it (a retracted request is prefilled again).
    """

    def __init__(self, ring: Ring):
        self.ring = ring
        self.dropped: dict[str, int] = {}  # reason -> samples
        self.samples = self.rows = 0  # finished, written
        self._open: dict[str, list[int]] = {}  # rid -> [serial, next seq]
        self._dead: set[str] = set()  # dropped, its finish or discard still to come
        self._pending: deque[tuple[int, int, str]] = (
            deque()
        )  # (serial, seq, reason): discards that found no room
        self._serial = 0
        self._width = 3 * ring.stream.hidden_size
        self._k = ring.stream.teacher_k
        self._piece = ring.capacity // 16  # bytes of a record at most, so that padding wastes little

    def count(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def write(
        self,
        rid: str,
        pos: int,
        aux: np.ndarray,
        teacher_pos: int,
        teacher_ids: np.ndarray,
        teacher_logp: np.ndarray,
        token_logp: np.ndarray,
    ) -> bool:
        """Rows of request ``rid``, copied before the call returns.

        ``aux`` uint16 [R, 3H] (bf16 bits) are rows pos … pos+R-1; ``teacher_ids`` int32 [M, K],
        ``teacher_logp`` float16 [M, K] and ``token_logp`` float16 [M] (NaN: no token) are teacher rows from
        ``teacher_pos``. R or M may be 0. Arrays of other shapes drop the sample as ``malformed``.
        """
        if rid in self._dead:
            return False
        ids = np.ascontiguousarray(teacher_ids, np.int32)
        logp = np.ascontiguousarray(teacher_logp, np.float16)
        token = np.ascontiguousarray(token_logp, np.float16)
        shape = (len(token), self._k)
        if aux.dtype != np.uint16 or aux.ndim != 2 or aux.shape[1] != self._width:
            return self._drop(rid, "malformed")
        if ids.shape != shape or logp.shape != shape or token.ndim != 1:
            return self._drop(rid, "malformed")
        entry = self._open.get(rid)
        if entry is None:
            self._serial += 1
            entry = self._open[rid] = [self._serial, 0]
        parts = []
        for row, rows, first, teachers in self._pieces(len(aux), len(token)):
            of = slice(first, first + teachers)
            head = {
                "pos": pos + row,
                "rows": rows,
                "teacher_pos": teacher_pos + first,
                "teacher_rows": teachers,
            }
            parts.append((head, (aux[row : row + rows], ids[of], logp[of], token[of])))
        if not self._publish(Kind.ROWS, entry, parts):
            return self._drop(rid, "ring_full")
        self.rows += len(aux)
        return True

    def finish(self, rid: str, meta: SampleMeta, input_ids: np.ndarray) -> bool:
        """The request's end: ``input_ids`` int32 [T] from ``meta.start_pos``; the spool cuts rows beyond
        them.
        """
        if rid in self._dead:
            self._dead.discard(rid)
            return False
        entry = self._open.get(rid)
        if entry is None:
            self.count("no_rows")
            return False
        encoded = np.frombuffer(json.dumps(meta.to_json()).encode(), np.uint8)
        tokens = np.ascontiguousarray(input_ids, np.int32)
        head = {"meta_bytes": len(encoded), "tokens": len(tokens)}
        done = self._publish(Kind.FINISH, entry, [(head, (tokens, encoded))])
        if not done:
            self._drop(rid, "ring_full")
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
        if entry and entry[1]:  # rows of it are with the spool
            self._pending.append((entry[0], entry[1], reason))
            self._flush()
        return False

    def _flush(self) -> bool:
        """Sends the discards that wait; they go before anything else, in order."""
        while self._pending:
            serial, seq, reason = self._pending[0]
            head = {"reason": reason.encode()[:16]}
            if not self._place(Kind.DISCARD, [serial, seq], [(head, ())], reserve=0):
                return False
            self._pending.popleft()
        return True

    def _publish(self, kind: Kind, entry: list[int], parts: list[tuple[dict[str, Any], tuple]]) -> bool:
        return self._flush() and self._place(kind, entry, parts, RESERVED)

    def _pieces(self, rows: int, teachers: int) -> Iterator[tuple[int, int, int, int]]:
        """Splits a write so that no record is longer than a piece: (row, rows, teacher row, teacher rows)."""
        row_bytes, teacher_bytes = 2 * self._width, 6 * self._k + 2
        if rows * row_bytes + teachers * teacher_bytes <= self._piece:
            yield 0, rows, 0, teachers
            return
        step = max(1, self._piece // row_bytes)
        for row in range(0, rows, step):
            yield row, min(step, rows - row), 0, 0
        step = max(1, self._piece // teacher_bytes)
        for first in range(0, teachers, step):
            yield rows, 0, first, min(step, teachers - first)

    def _place(
        self, kind: Kind, entry: list[int], parts: list[tuple[dict[str, Any], tuple]], reserve: int
    ) -> bool:
        """Writes all records or none; moves ``head`` once, at the end."""
        ring, head = self.ring, self.ring.head
        limit = ring.tail + ring.capacity - reserve
        places = []
        for fields, arrays in parts:
            length = ALIGN + sum(array.nbytes for array in arrays)
            length += -length % ALIGN
            room = ring.capacity - head % ring.capacity
            pad = room if room < length else 0
            places.append((head, pad, length, fields, arrays))
            head += pad + length
        if head > limit:
            return False
        for start, pad, length, fields, arrays in places:
            if pad:
                self._header(start, Kind.PAD, pad, [0, 0], {})
                start += pad
            self._header(start, kind, length, entry, fields)
            offset = start % ring.capacity + ALIGN
            for array in arrays:
                target = ring.data[offset : offset + array.nbytes]
                np.copyto(target.view(array.dtype).reshape(array.shape), array)
                offset += array.nbytes
            entry[1] += 1
        ring.head = head
        return True

    def _header(self, start: int, kind: Kind, length: int, entry: list[int], of: dict[str, Any]) -> None:
        HEADER.pack_into(
            self.ring.memory,
            DATA_OFFSET + start % self.ring.capacity,
            RECORD_MAGIC,
            kind,
            0,
            length,
            entry[1],
            entry[0],
            of.get("pos", 0),
            of.get("rows", 0),
            of.get("teacher_pos", 0),
            of.get("teacher_rows", 0),
            of.get("meta_bytes", 0),
            of.get("tokens", 0),
            of.get("reason", b""),
        )
