"""The spool itself: fills and seals segments with the samples of every rank's ring (see ``spool.py``)."""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tide_platform.capture.disk import SPARE_FILE, Disk
from tide_platform.capture.feed import Feed
from tide_platform.capture.folder import (
    STATUS_FILE,
    keep_budget,
    make_folder,
    write_status,
)
from tide_platform.capture.journal import Journal, JournalDamaged
from tide_platform.capture.packing import AuxFormat, pack
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.ring import rank_paths
from tide_platform.capture.segment import OPEN, SegmentWriter, recover_segment
from tide_platform.capture.split import kept_whole
from tide_platform.config import TideError
from tide_platform.config.locks import LockHeld, locked

log = logging.getLogger("tide.spool")
LOCK_FILE = "spool.lock"
# between two looks at empty rings: each takes a core from the server's forward step for a moment
_PAUSE_SECONDS = (0.005, 0.05)
_RING_RATE = 1e9  # bytes a second that a server may write
_RING_CHECK_SECONDS = 0.2
_STATUS_SECONDS = 1.0
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
    """Follows the ring at ``ring_path``, and beside it those of the server's further data-parallel ranks;
    writes segments into ``folder``.
    """

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
        self._feeds: dict[Path, Feed] = {}  # by the ring's path
        self._segment: SegmentWriter | None = None
        self._slot = 0  # the segment's in the journal
        self._dropped: Counter[str] = Counter()  # here, beside what the feeds lost
        self._samples = self._bytes = 0
        self._sealed: deque[Path] = deque()  # by the disk's thread, to be counted
        # samples that the disk's thread is done with, by id
        self._released: deque[tuple[Feed, str]] = deque()
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
        """One look at the rings and the clock; ``False`` where there was nothing to do."""
        self._disk.check()
        now = time.monotonic()
        if now - self._checked > _RING_CHECK_SECONDS or not any(f.attached for f in self._feeds.values()):
            self._checked = now
            self._follow()
        busy = self._drain()
        if not busy and self._segment:
            self._segment.flush()
        self._seal_if_due()
        self._settle()
        if now - self._reported > _STATUS_SECONDS:
            self._report()
        return busy

    def pause(self) -> float:
        """Seconds until the next look, where the last one found nothing: as many as fill a quarter of a ring
        at most, within limits.
        """
        least, most = _PAUSE_SECONDS
        rings = [feed.capacity for feed in self._feeds.values() if feed.attached]
        return max(least, min([most, *(each / 4 / _RING_RATE for each in rings)]))

    def seal_and_wait(self) -> None:
        """Everything stored so far is durable when this returns."""
        self._seal()
        self._disk.wait()
        self._settle()

    def close(self) -> None:
        """Drains what the rings hold, seals and reports; the next spool counts the requests in flight."""
        self._stop.set()
        try:
            while self._drain():
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
        for path in rank_paths(self._ring_path):
            if path not in self._feeds:
                self._feeds[path] = Feed(
                    path, self._settings.max_tokens, self._journal, self._store, self._say, self._clock
                )
        for feed in self._feeds.values():
            if feed.follow():
                self._seal()

    def _drain(self) -> bool:
        """A part of each ring; ``False`` where all were empty."""
        return any([feed.drain() for feed in self._feeds.values()])

    def _store(self, feed: Feed, stream: StreamMeta, sample: Sample) -> None:
        settings, meta = self._settings, sample.meta
        whole = kept_whole(meta.request_id, meta.tenant, settings.validation_share)
        packed = sample if whole else pack(sample, settings.aux_format)
        if self._segment is not None and self._segment.stream != stream:
            self._seal()
        try:
            if self._segment is None:
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
            return self._unstored(feed, sample, error)
        before = self._segment.bytes
        try:
            self._segment.append(packed, lambda: self._released.append((feed, meta.sample_id)))
        except OSError as error:
            self._journal.undo(self._slot)
            self._seal()
            return self._unstored(feed, sample, error)
        self._samples += 1
        grown = self._segment.bytes - before
        self._reserve = max(self._reserve, settings.segment_bytes + grown)
        if self._segment.bytes >= settings.segment_bytes:
            self._seal()
        elif self._segment.bytes >= settings.segment_bytes // 2:
            self._disk.prepare(self._folder, self._reserve)

    def _unstored(self, feed: Feed, sample: Sample, error: OSError) -> None:
        feed.release(sample.meta.sample_id)
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
        while self._released:
            feed, sample_id = self._released.popleft()
            feed.release(sample_id)
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
        dropped, lost = self._dropped.copy(), Counter[str]()
        for feed in self._feeds.values():
            of_feed, of_ring = feed.losses()
            dropped.update(of_feed)
            lost.update(of_ring)
        dropped = +dropped
        status = {"pid": os.getpid(), "at": self._clock(), "dropped": dropped, "ring_dropped": lost}
        status |= {"samples": self._samples, "segments": self._segments, "bytes": self._bytes}
        status |= {"disk_errors": self._disk.errors, "buffered_segments": self._buffered}
        try:
            write_status(self._folder / STATUS_FILE, status)
        except OSError as error:
            self._say("%s: %s", self._folder / STATUS_FILE, error)

    def _waiting(self) -> None:
        """The disk is behind: the ring fills up meanwhile, and the server drops what does not fit."""
        for feed in self._feeds.values():
            feed.beat()
        if self._stop.is_set():
            self._stopping = self._stopping or time.monotonic()
            if time.monotonic() - self._stopping > _STOP_SECONDS:
                raise DiskStuck(self._folder)

    def _say(self, message: str, *values: object) -> None:
        """An error that repeats is said once a period."""
        if time.monotonic() - self._said.get(message, -_SAY_SECONDS) >= _SAY_SECONDS:
            self._said[message] = time.monotonic()
            log.error(message, *values)
