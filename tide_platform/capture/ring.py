"""The ring between the server's scheduler and the spool: one mapped file, one writer, one reader.

The file outlives both processes; positions stand in its header, so a spool that was killed goes on where the
dead one stopped (see ``spool.py`` for what that costs). Here is the mapping and its layout; the ends are
``writer.py`` and ``reader.py``.

Layout (little endian)::

    0       magic, capacity, epoch, length of the stream's JSON, crc32c of these and of that JSON
    64      head: bytes ever written      (the writer's)      each on its own cache line
    128     tail: bytes ever consumed     (the spool's)
    192     heartbeat of the spool (seconds since boot), its pid, the requests that it holds
    1024    what the writer lost: 96 slots of a reason (24 bytes, zero-padded) and a count
    4096    StreamMeta as JSON
    65536   data: records, 64-byte aligned, contiguous; a PAD record fills what is left before the end

A record becomes visible when ``head`` moves past it, an aligned 8-byte store. x86-64 keeps the order of
stores; a CPU that does not would need a fence there. Each end keeps its own position in its memory and only
stores it here: a damaged header cannot send a writer outside the data.
"""

import contextlib
import json
import mmap
import os
import re
import secrets
import struct
import time
from enum import IntEnum
from pathlib import Path

import google_crc32c
import numpy as np

from tide_platform.capture.record import StreamMeta
from tide_platform.config import TideError

MAGIC = b"TIDERNG2"
RECORD_MAGIC = 0x54494445
DATA_OFFSET = 1 << 16
STREAM_OFFSET = 4096
ALIGN = 64
# kept free of rows, so that a discard finds room in a ring that rows have filled
RESERVED = 64 * ALIGN
_HEAD, _TAIL, _BEAT = 64 // 8, 128 // 8, 192 // 8
_PID, _IN_FLIGHT = _BEAT + 1, _BEAT + 2
_LOST_OFFSET, _LOST_SLOTS, _REASON_BYTES = 1024, 96, 24
_LOST = np.dtype([("reason", f"S{_REASON_BYTES}"), ("count", np.uint64)])
FILE_HEADER = struct.Struct("<8sQQI")
_FILE_CRC = struct.Struct("<I")
# magic kind length seq serial position pos rows teacher_pos teacher_rows tokens_pos tokens json_bytes; crc32c
# of all of the record but itself. The position tells a record from one of the ring's former rounds
HEADER = struct.Struct("<IIIIQQiIiIiII")
CRC = struct.Struct("<I")
CRC_OFFSET = HEADER.size
assert CRC_OFFSET + CRC.size == ALIGN


class Kind(IntEnum):
    BEGIN = 1  # SampleMeta as JSON: what is known at admission
    ROWS = 2  # rows, teacher rows, confirmed tokens
    UPDATE = 3  # fields of SampleMeta as JSON that changed
    FINISH = 4  # the final SampleMeta, where the tokens end
    DISCARD = 5  # {"reason": …}
    PAD = 6


class RingUnusable(TideError):
    """The ring's file is absent, of another format, or damaged."""

    def __init__(self, path: Path, what: str):
        super().__init__(f"{path}: {what}; restart the server, which makes a new ring")
        self.path, self.what = path, what


class Ring:
    """The mapped file. :meth:`create` is the server's, :meth:`open` the spool's."""

    def __init__(self, path: Path, memory: mmap.mmap, inode: int):
        magic, self.capacity, self.epoch, length = FILE_HEADER.unpack_from(memory, 0)
        if magic != MAGIC or len(memory) != DATA_OFFSET + self.capacity:
            raise RingUnusable(path, "not a ring of this release")
        if length > DATA_OFFSET - STREAM_OFFSET or _file_crc(memory, length) != _stored_crc(memory):
            raise RingUnusable(path, "its header has a wrong checksum")
        self.path, self.inode, self.memory = path, inode, memory
        self.stream = StreamMeta.from_json(json.loads(memory[STREAM_OFFSET : STREAM_OFFSET + length]))
        self._words = np.frombuffer(memory, np.uint64, _LOST_OFFSET // 8)
        self._clock = self._words.view(np.float64)
        self._lost = np.frombuffer(memory, _LOST, _LOST_SLOTS, _LOST_OFFSET)
        self.data = np.frombuffer(memory, np.uint8, self.capacity, DATA_OFFSET)

    @classmethod
    def create(cls, path: Path | str, bytes: int, stream: StreamMeta) -> "Ring":
        """A new ring of about ``bytes`` data bytes at ``path``, its pages already touched, readable by its
        owner alone.

        A ring that is there already is set aside as ``<name>.left-<epoch>`` when the spool still has
        something to read or count in it, else replaced.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        capacity = bytes // ALIGN * ALIGN
        if capacity < 16 * RESERVED:
            raise RingUnusable(path, f"{bytes} bytes are too few, {16 * RESERVED} is the least")
        encoded = json.dumps(stream.to_json()).encode()
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, DATA_OFFSET + capacity)
            memory = mmap.mmap(descriptor, DATA_OFFSET + capacity)
            inode = os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)
        # a page fault on the scheduler's thread costs ten times the copy itself
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 0
        memory[STREAM_OFFSET : STREAM_OFFSET + len(encoded)] = encoded
        FILE_HEADER.pack_into(memory, 0, MAGIC, capacity, secrets.randbits(63), len(encoded))
        _FILE_CRC.pack_into(memory, FILE_HEADER.size, _file_crc(memory, len(encoded)))
        _set_aside(path)
        temporary.rename(path)
        return cls(path, memory, inode)

    @classmethod
    def open(cls, path: Path | str) -> "Ring":
        """Raises :class:`RingUnusable` where there is none that can be read."""
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
        self._clock[_BEAT] = time.monotonic()  # one clock for all processes of a machine; never goes back
        self._words[_PID] = os.getpid()

    def spool_age(self) -> float:
        """Seconds since the spool last said that it lives; infinite where none ever did."""
        beat, now = float(self._clock[_BEAT]), time.monotonic()
        return now - beat if 0 < beat <= now else float("inf")

    @property
    def in_flight(self) -> int:
        """Requests that the spool's memory holds: a spool that is killed loses them."""
        return int(self._words[_IN_FLIGHT])

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._words[_IN_FLIGHT] = count

    def count_lost(self, slot: int, reason: str, count: int) -> None:
        """Publishes the writer's counter ``slot`` for the spool's report; reasons beyond the last slot are
        left out.
        """
        if slot < _LOST_SLOTS:
            self._lost[slot] = (reason.encode()[:_REASON_BYTES], count)

    def lost(self) -> dict[str, int]:
        """Samples that the writer gave up, by reason, since this ring was made."""
        kept = self._lost[self._lost["count"] > 0]
        return {row["reason"].decode(errors="replace"): int(row["count"]) for row in kept}

    def settle(self) -> dict[str, int]:
        """The same, and forgets them: the ring's server is gone, and its losses are counted elsewhere now."""
        lost = self.lost()
        self._lost["count"] = 0
        self.in_flight = 0
        return lost

    def close(self) -> None:
        """Drops the mapping as soon as no view of it is left (a mapping cannot go before its views)."""
        del self._words, self._clock, self._lost, self.data
        with contextlib.suppress(BufferError):
            self.memory.close()


def record_crc(data: np.ndarray, offset: int, length: int) -> int:
    """crc32c of the record of ``length`` bytes at ``offset``: its header, then its body."""
    crc = google_crc32c.value(data[offset : offset + CRC_OFFSET])
    return google_crc32c.extend(crc, data[offset + ALIGN : offset + length]) if length > ALIGN else crc


def _file_crc(memory: mmap.mmap, length: int) -> int:
    return google_crc32c.value(memory[: FILE_HEADER.size] + memory[STREAM_OFFSET : STREAM_OFFSET + length])


def _stored_crc(memory: mmap.mmap) -> int:
    return _FILE_CRC.unpack_from(memory, FILE_HEADER.size)[0]


def rank_path(path: Path, dp_rank: int) -> Path:
    """The ring of a data-parallel rank of the server whose rank 0 writes to ``path``."""
    return path.with_name(f"{path.name}.dp{dp_rank}") if dp_rank else path


def rank_paths(path: Path) -> list[Path]:
    """Where there is something of a rank of that server to be read; ``path`` itself is always among them."""
    names = re.compile(rf"({re.escape(path.name)}(?:\.dp\d+)?)(?:\.left-[0-9a-f]+)?")
    found = (names.fullmatch(each.name) for each in path.parent.glob(f"{path.name}*"))
    return sorted({path, *(path.with_name(each[1]) for each in found if each)})


def leave_ranks_from(path: Path, ranks: int) -> None:
    """Sets the rings of ranks aside that a server with ``ranks`` of them has no longer."""
    kept = {rank_path(path, rank) for rank in range(ranks)}
    for each in rank_paths(path):
        if each not in kept and each.exists():
            _set_aside(each, always=True)


def left_path(path: Path, epoch: int) -> Path:
    """Where a ring of ``path`` waits for the spool once it has been replaced."""
    return path.with_name(f"{path.name}.left-{epoch:016x}")


def left_paths(path: Path) -> list[Path]:
    """The rings of ``path`` that wait, oldest first."""
    return sorted(path.parent.glob(f"{path.name}.left-*"), key=lambda each: each.stat().st_mtime)


def _set_aside(path: Path, always: bool = False) -> None:
    """Keeps a former ring's unread records, and what it tells of losses, for the spool. ``always``: no other
    ring takes its place.
    """
    try:
        former = Ring.open(path)
    except (RingUnusable, ValueError):
        return
    if always or former.head != former.tail or former.in_flight or former.lost():
        path.rename(left_path(path, former.epoch))
    former.close()
