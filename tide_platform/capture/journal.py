"""What a spool's memory holds, counted in a mapped file: after a kill the next spool knows how many samples
were lost, though nothing else tells.
"""

import mmap
import os
import struct
from pathlib import Path

from tide_platform.config import TideError

JOURNAL_FILE = "spool.journal"
_SLOT = struct.Struct("<56sQ")
_SLOTS = 16  # segments that are written or wait to be sealed, at a time
_SIZE = 4096
_LIMIT = 1 << 24  # samples in memory: beyond, it is garbage
_PENDING = _SLOTS * _SLOT.size  # samples taken from the ring that no segment holds yet


class JournalDamaged(TideError):
    """Counts that cannot be."""

    def __init__(self, path: Path):
        super().__init__(f"{path}: damaged; how many samples the last spool lost is not known, none is wrong")
        self.path = path


class Journal:
    """One spool's at a time (its lock says which)."""

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL_FILE
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)
            self._memory = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._memory).cast("Q")

    def take(self, samples: int) -> None:
        """Samples left the ring. Before the ring's tail moves past them."""
        self._words[_PENDING // 8] += samples

    def settle(self) -> None:
        """One of them is dropped and counted."""
        self._words[_PENDING // 8] -= 1

    def open(self, segment_id: str) -> int:
        """A slot for a segment that is begun."""
        used = self._entries()
        slot = next(number for number in range(_SLOTS) if number not in used)
        _SLOT.pack_into(self._memory, slot * _SLOT.size, segment_id.encode(), 0)
        return slot

    def append(self, slot: int) -> None:
        """One of the samples taken is in the segment."""
        self._words[(slot + 1) * _SLOT.size // 8 - 1] += 1
        self._words[_PENDING // 8] -= 1

    def undo(self, slot: int) -> None:
        """The segment could not take it after all; it is dropped and counted."""
        self._words[(slot + 1) * _SLOT.size // 8 - 1] -= 1

    def close(self, slot: int) -> None:
        """The segment is sealed, or gone with nothing in it."""
        _SLOT.pack_into(self._memory, slot * _SLOT.size, b"", 0)

    def left(self) -> tuple[dict[str, int], int]:
        """What a killed spool left: samples by segment that was not sealed, and samples in no segment.
        Forgets them. Raises :class:`JournalDamaged`.
        """
        segments, pending = dict(self._entries().values()), self._words[_PENDING // 8]
        self._memory[:_SIZE] = bytes(_SIZE)
        if any(count > _LIMIT for count in (*segments.values(), pending)):
            raise JournalDamaged(self._path)
        return segments, pending

    def _entries(self) -> dict[int, tuple[str, int]]:
        slots = (_SLOT.unpack_from(self._memory, slot * _SLOT.size) for slot in range(_SLOTS))
        return {
            number: (name.rstrip(b"\0").decode(errors="replace"), count)
            for number, (name, count) in enumerate(slots)
            if name[0]
        }
