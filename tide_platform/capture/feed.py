"""The reading end of one rank's ring: follows it and the rings that replace it, puts samples together."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tide_platform.capture.assemble import Assembler
from tide_platform.capture.journal import Journal
from tide_platform.capture.reader import RecordBroken, RingReader
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.ring import Ring, RingUnusable, left_path, left_paths

log = logging.getLogger("tide.spool")
_BATCH = 256  # records between two looks at the clock


class Feed:
    """Of the ring at ``path``, which may appear later. Samples go to ``store``, with the feed whose
    :meth:`release` waits for them and the stream that they are of; ``say`` logs an error that repeats.
    """

    def __init__(
        self,
        path: Path,
        max_tokens: int,
        journal: Journal,
        store: Callable[["Feed", StreamMeta, Sample], None],
        say: Callable[..., None],
        clock: Callable[[], float] = time.time,
    ):
        self.path = path
        self._max_tokens, self._journal, self._store, self._say = max_tokens, journal, store, say
        self._clock = clock
        self._reader: RingReader | None = None
        self._assembler: Assembler | None = None
        self._dropped: Counter[str] = Counter()  # of the rings that are closed
        self._ring_dropped: Counter[str] = Counter()
        self._inherited = 0  # requests in flight that a killed spool had taken from this ring

    @property
    def attached(self) -> bool:
        """Whether there is a ring that is read."""
        return self._reader is not None

    @property
    def capacity(self) -> int:
        """Bytes of that ring; 0 where there is none."""
        return self._reader.ring.capacity if self._reader else 0

    def follow(self) -> bool:
        """Looks whether the ring was replaced; ``True`` where one was left for good."""
        left = False
        if self._reader:
            self._reader.ring.beat()
            if not self._gone(self._reader.ring):
                return False
            self._leave()
            left = True
        for path in left_paths(self.path):
            if self._enter(path):
                self._leave()
                left = True
            else:
                self._dropped["ring_broken"] += 1  # how many samples were in it, nobody can tell
            path.unlink()
        if self.path.exists():
            self._enter(self.path)
        return left

    def drain(self, records: int = _BATCH) -> bool:
        """Takes up to so many records; ``False`` where there was none."""
        if self._reader is None or self._assembler is None:
            return False
        reader, assembler = self._reader, self._assembler
        for done in range(records):
            try:
                record = reader.peek()
            except RecordBroken as error:
                self._say("%s", error)
                assembler.drop_all("ring_broken")
                return True
            except RingUnusable as error:
                self._say("%s", error)
                return False
            if record is None:
                return done > 0
            samples = assembler.take(record)
            if samples:
                self._journal.take(len(samples))
            reader.ring.in_flight = assembler.in_flight + max(0, self._inherited - assembler.gaps)
            reader.advance(record)
            for sample in samples:
                self._store(self, reader.ring.stream, sample)
        return True

    def release(self, sample_id: str) -> None:
        """The memory of a sample is free again. One of a ring that was left is gone with it."""
        if self._assembler:
            self._assembler.release(sample_id)

    def beat(self) -> None:
        """Tells the server that the spool lives."""
        if self._reader:
            self._reader.ring.beat()

    def losses(self) -> tuple[Counter[str], Counter[str]]:
        """Samples lost here, and those that the server gave up, by reason, since this process started."""
        dropped, lost = self._dropped.copy(), self._ring_dropped.copy()
        if self._reader and self._assembler:
            dropped.update(self._assembler.dropped)
            lost.update(self._reader.ring.lost())
        return dropped, lost

    def _gone(self, ring: Ring) -> bool:
        """Another ring stands there, or this one was set aside. None at all for a moment is no news."""
        try:
            return self.path.stat().st_ino != ring.inode
        except FileNotFoundError:
            return left_path(self.path, ring.epoch).exists()

    def _enter(self, path: Path) -> bool:
        try:
            ring = Ring.open(path)
        except RingUnusable as error:
            self._say("%s", error)
            return False
        log.info("reading %s, target %s", path, ring.stream.target_digest)
        self._reader = RingReader(ring)
        self._dropped["ring_broken"] += self._reader.gave_up
        self._assembler = Assembler(ring.stream, self._max_tokens, clock=self._clock)
        self._inherited = ring.in_flight
        ring.beat()
        return True

    def _leave(self) -> None:
        """The server is gone: what it wrote is taken, what it left unfinished is counted."""
        while self.drain():
            pass
        assert self._reader is not None and self._assembler is not None
        ring, assembler = self._reader.ring, self._assembler
        assembler.drop_all("server_gone")
        # requests that a killed spool had begun and of which nothing came any more
        if (unseen := self._inherited - assembler.gaps) > 0:
            self._dropped["spool_restarted"] += unseen
        self._dropped.update(assembler.dropped)
        self._ring_dropped.update(ring.settle())
        self._reader = self._assembler = None
        ring.close()
