"""The spool itself: follows the ring, puts samples together, fills and seals segments (see ``spool.py``)."""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tide_platform.capture.assemble import Assembler
from tide_platform.capture.disk import SPARE_FILE, Disk
from tide_platform.capture.folder import (
    STATUS_FILE,
    keep_budget,
    make_folder,
    write_status,
)
from tide_platform.capture.journal import Journal, JournalDamaged
from tide_platform.capture.packing import AuxFormat, pack
from tide_platform.capture.reader import RecordBroken, RingReader
from tide_platform.capture.record import Sample
from tide_platform.capture.ring import Ring, RingUnusable
from tide_platform.capture.segment import OPEN, SegmentWriter, recover_segment
from tide_platform.capture.split import kept_whole
from tide_platform.config import TideError
from tide_platform.config.locks import LockHeld, locked

log = logging.getLogger("tide.spool")
LOCK_FILE = "spool.lock"
_RING_CHECK_SECONDS = 0.2
_STATUS_SECONDS = 1.0
_BATCH = 256  # records between two looks at the clock
_SAY_SECONDS = 30.0
_STOP_SECONDS = 10.0  # that a disk which refuses its writes is waited for at the end


class SpoolBusy(TideError):
    """A second spool on one folder."""

    def __init__(self, folder: Path):
        super().__init__(f"{folder}: another spool writes there; stop it first")
        self.folder = folder


class DiskStuck(TideError):
    """The spool is to end, and its disk takes nothing."""

    def __init__(self, folder: Path):
        super().__init__(
            f"{folder}: the disk takes no writes; samples in memory are lost, free space and restart"
        )
        self.folder = folder


@dataclass(frozen=True)
class SpoolSettings:
    """See ``capture`` in ``config/schema.py``."""

    segment_bytes: int = 32 << 20
    segment_seconds: float = 2.0
    max_tokens: int = 4096
    aux_format: AuxFormat = "bf16"
    validation_share: float = 0.0  # of requests whose aux states stay bf16, as well as the reference set's
    spool_bytes: int = 8 << 30  # of sealed segments that wait


class Spool:
    """Follows the ring at ``ring_path`` (and the ones that replace it), writes segments into ``folder``."""

    def __init__(
        self,
        ring_path: Path,
        folder: Path,
        settings: SpoolSettings,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._ring_path, self._folder, self._settings, self._clock = ring_path, folder, settings, clock
        self._stop = stop or threading.Event()
        self._stopping = 0.0
        self._reader: RingReader | None = None
        self._assembler: Assembler | None = None
        self._segment: SegmentWriter | None = None
        self._slot = 0  # the segment's in the journal
        self._dropped: Counter[str] = Counter()  # of this process and the rings that are closed
        self._ring_dropped: Counter[str] = Counter()
        self._inherited = 0  # requests in flight that a killed spool had taken from this ring
        self._samples = self._bytes = 0
        self._sealed: deque[Path] = deque()  # by the disk's thread, to be counted
        self._released: deque[str] = deque()  # ids of samples that the disk's thread is done with
        self._segments = 0
        self._reserve = settings.segment_bytes  # of a segment's file: the last sample goes beyond its size
        self._buffered = 0  # segments whose file system refused O_DIRECT
        self._checked = self._reported = 0.0
        self._said: dict[str, float] = {}
        make_folder(folder)
        self._lock = contextlib.ExitStack()
        try:
            self._lock.enter_context(locked(folder / LOCK_FILE))
        except LockHeld as error:
            raise SpoolBusy(folder) from error
        self._journal = Journal(folder)
        self._disk = Disk(self._waiting)

    def recover(self) -> None:
        """Seals what a former spool left open, counts what it lost."""
        (self._folder / SPARE_FILE).unlink(missing_ok=True)
        try:
            appended, lost = self._journal.left()
        except JournalDamaged as error:
            log.error("%s", error)
            appended, lost = {}, 0
        for path in sorted(self._folder.glob(f"*{OPEN}")):
            found = recover_segment(path)
            cut = f", cut a torn tail of {found.cut_bytes} bytes" if found.cut_bytes else ""
            log.warning("%s was left open: %d whole samples kept%s", path.name, found.samples, cut)
            self._segments += found.path is not None
            self._samples += found.samples
            lost += max(0, appended.get(path.stem, 0) - found.samples)
        if lost:
            log.error("%d samples were in the memory of a spool that was killed", lost)
            self._dropped["spool_restarted"] += lost
        self._keep_budget()

    def step(self) -> bool:
        """One look at the ring and the clock; ``False`` where there was nothing to do."""
        self._disk.check()
        now = time.monotonic()
        if now - self._checked > _RING_CHECK_SECONDS or self._reader is None:
            self._checked = now
            self._follow()
        busy = self._drain(_BATCH) if self._reader else False
        if not busy and self._segment:
            self._segment.flush()
        self._seal_if_due()
        self._settle()
        if now - self._reported > _STATUS_SECONDS:
            self._report()
        return busy

    def seal_and_wait(self) -> None:
        """Everything stored so far is durable when this returns."""
        self._seal()
        self._disk.wait()
        self._settle()

    def close(self) -> None:
        """Drains what the ring holds, seals and reports; the next spool counts the requests in flight."""
        self._stop.set()
        try:
            while self._reader and self._drain(_BATCH):
                pass
            self._seal()
        except DiskStuck as error:
            log.error("%s", error)
        if not self._disk.close(_STOP_SECONDS):
            log.error("%s", DiskStuck(self._folder))
        self._settle()
        self._report()
        self._lock.close()

    def _follow(self) -> None:
        if self._reader:
            self._reader.ring.beat()
            if _inode(self._ring_path) in (self._reader.ring.inode, None):
                return
            while self._drain(_BATCH):
                pass
            self._leave("server_gone")
        for left in sorted(self._ring_path.parent.glob(f"{self._ring_path.name}.left-*"), key=_modified):
            if self._enter(left):
                while self._drain(_BATCH):
                    pass
                self._leave("server_gone")
            else:
                self._dropped["ring_broken"] += 1  # how many samples were in it, nobody can tell
            left.unlink()
        if self._ring_path.exists():
            self._enter(self._ring_path)

    def _enter(self, path: Path) -> bool:
        try:
            ring = Ring.open(path)
        except RingUnusable as error:
            self._say("%s", error)
            return False
        log.info("reading %s, target %s", path, ring.stream.target_digest)
        self._reader = RingReader(ring)
        self._dropped["ring_broken"] += self._reader.gave_up
        self._assembler = Assembler(ring.stream, self._settings.max_tokens, clock=self._clock)
        self._inherited = ring.in_flight
        ring.beat()
        return True

    def _leave(self, reason: str) -> None:
        assert self._reader is not None and self._assembler is not None
        ring, assembler = self._reader.ring, self._assembler
        assembler.drop_all(reason)
        # requests that a killed spool had begun and of which nothing came any more
        if (unseen := self._inherited - assembler.gaps) > 0:
            self._dropped["spool_restarted"] += unseen
        self._seal()
        self._dropped.update(assembler.dropped)
        self._ring_dropped.update(ring.settle())
        self._reader = self._assembler = None
        ring.close()

    def _drain(self, records: int) -> bool:
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
                self._store(sample)
        return True

    def _store(self, sample: Sample) -> None:
        assert self._reader is not None and self._assembler is not None
        settings, meta = self._settings, sample.meta
        whole = kept_whole(meta.request_id, meta.tenant, settings.validation_share)
        packed = sample if whole else pack(sample, settings.aux_format)
        try:
            if self._segment is None:
                stream = self._reader.ring.stream
                self._segment = SegmentWriter(self._folder, stream, self._disk, self._reserve)
                self._slot = self._journal.open(self._segment.segment_id)
                if not self._segment.direct:
                    self._say(
                        "%s: its file system refuses O_DIRECT; writes go through the cache", self._folder
                    )
                    self._buffered += 1
            self._journal.append(self._slot)
        except OSError as error:
            self._journal.settle()
            return self._unstored(sample, error)
        before = self._segment.bytes
        try:
            self._segment.append(packed, lambda: self._released.append(meta.sample_id))
        except OSError as error:
            self._journal.undo(self._slot)
            self._seal()
            return self._unstored(sample, error)
        self._samples += 1
        grown = self._segment.bytes - before
        self._reserve = max(self._reserve, settings.segment_bytes + grown)
        if self._segment.bytes >= settings.segment_bytes:
            self._seal()
        elif self._segment.bytes >= settings.segment_bytes // 2:
            self._disk.prepare(self._folder, self._reserve)

    def _unstored(self, sample: Sample, error: OSError) -> None:
        assert self._assembler is not None
        self._assembler.release(sample.meta.sample_id)
        self._dropped["spool_disk"] += 1
        self._say("%s: cannot write samples: %s; they are dropped and counted", self._folder, error)

    def _seal_if_due(self) -> None:
        if self._segment and time.monotonic() - self._segment.created >= self._settings.segment_seconds:
            self._seal()

    def _seal(self) -> None:
        if self._segment is None:
            return
        segment, slot, self._segment = self._segment, self._slot, None
        if segment.samples:
            segment.seal_later(lambda path: self._done(path, slot))
            self._bytes += segment.bytes
        else:
            segment.abandon()
            self._journal.close(slot)

    def _done(self, path: Path, slot: int) -> None:
        """Called by the disk's thread."""
        self._journal.close(slot)
        self._sealed.append(path)

    def _settle(self) -> None:
        """What the disk's thread has done since."""
        while self._released and self._assembler:
            self._assembler.release(self._released.popleft())
        if self._sealed:
            while self._sealed:
                log.info("sealed %s", self._sealed.popleft().name)
                self._segments += 1
            self._keep_budget()
            self._report()

    def _keep_budget(self) -> None:
        if lost := keep_budget(self._folder, self._settings.spool_bytes):
            self._dropped["spool_full"] += lost

    def _report(self) -> None:
        """What `tide samples stats` shows: counters since this process started."""
        self._reported = time.monotonic()
        dropped, lost = +self._dropped, self._ring_dropped.copy()
        if self._reader and self._assembler:
            dropped.update(self._assembler.dropped)
            lost.update(self._reader.ring.lost())
        status = {"pid": os.getpid(), "at": self._clock(), "dropped": dropped, "ring_dropped": lost}
        status |= {"samples": self._samples, "segments": self._segments, "bytes": self._bytes}
        status |= {"disk_errors": self._disk.errors, "buffered_segments": self._buffered}
        try:
            write_status(self._folder / STATUS_FILE, status)
        except OSError as error:
            self._say("%s: %s", self._folder / STATUS_FILE, error)

    def _waiting(self) -> None:
        """The disk is behind: the ring fills up meanwhile, and the server drops what does not fit."""
        if self._reader:
            self._reader.ring.beat()
        if self._stop.is_set():
            self._stopping = self._stopping or time.monotonic()
            if time.monotonic() - self._stopping > _STOP_SECONDS:
                raise DiskStuck(self._folder)

    def _say(self, message: str, *values: object) -> None:
        """An error that repeats is said once a period."""
        if time.monotonic() - self._said.get(message, -_SAY_SECONDS) >= _SAY_SECONDS:
            self._said[message] = time.monotonic()
            log.error(message, *values)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _modified(path: Path) -> float:
    return path.stat().st_mtime
