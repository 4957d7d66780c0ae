"""The spool: a process that drains the ring into durable segments.

``python -m tide_platform.capture.spool --ring PATH --folder DIR …``

What a crash costs, by rule:

- A sample in a sealed segment is safe. One in the ``.open`` segment is safe too unless the machine itself
goes down:
  the next spool cuts the torn tail, says so, and seals the rest.
- The ring's ``tail`` moves past a record once its content is in this process's memory or, for the last
record of a
  request, once its sample is written to the segment. So if the spool is killed, the requests *in flight*
  lose their first rows; the next spool sees that (record numbers) and drops and counts them as
  ``spool_restarted``. Nothing is stored with a part missing, and unread records wait in the ring.
- A server that restarts makes a new ring; unread records of the old one are drained first.
"""

import argparse
import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tide_platform.capture.assemble import Assembler
from tide_platform.capture.reader import RingReader
from tide_platform.capture.record import Sample
from tide_platform.capture.ring import Ring, RingUnusable
from tide_platform.capture.segment import OPEN, SEALED, SegmentWriter, recover_segment
from tide_platform.config import TideError

log = logging.getLogger("tide.spool")
STATUS_FILE = "spool.json"
LOCK_FILE = "spool.lock"
IDLE_SECONDS = 0.005
_RING_CHECK_SECONDS = 0.2
_BATCH = 256  # records between two looks at the clock
_SAY_SECONDS = 30.0


class SpoolBusy(TideError):
    """A second spool on one folder."""

    def __init__(self, folder: Path):
        super().__init__(f"{folder}: another spool writes there; stop it first")
        self.folder = folder


class Spool:
    """Follows the ring at ``ring_path`` (and the ones that replace it), writes segments into ``folder``."""

    def __init__(
        self, ring_path: Path, folder: Path, segment_bytes: int, segment_seconds: float, max_tokens: int
    ):
        self._ring_path, self._folder, self._max_tokens = ring_path, folder, max_tokens
        self._segment_bytes, self._segment_seconds = segment_bytes, segment_seconds
        self._reader: RingReader | None = None
        self._assembler: Assembler | None = None
        self._segment: SegmentWriter | None = None
        self._dropped: dict[str, int] = {}  # of the rings that are closed
        self._samples = self._segments = 0
        self._checked = self._said = self._failed = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / LOCK_FILE).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SpoolBusy(folder) from error

    def recover(self) -> None:
        """Seals what a former spool left open."""
        for path in sorted(self._folder.glob(f"*{OPEN}")):
            found = recover_segment(path)
            cut = f", cut a torn tail of {found.cut_bytes} bytes" if found.cut_bytes else ""
            log.warning("%s was left open: %d whole samples kept%s", path.name, found.samples, cut)
            self._segments += found.path is not None

    def step(self) -> bool:
        """One look at the ring and the clock; ``False`` where there was nothing to do."""
        now = time.monotonic()
        if now - self._checked > _RING_CHECK_SECONDS or self._reader is None:
            self._checked = now
            self._follow()
        busy = self._drain(_BATCH) if self._reader else False
        self._seal_if_due()
        return busy

    def close(self) -> None:
        """Drains what the ring holds, seals and reports; the next spool counts the requests in flight."""
        while self._reader and self._drain(_BATCH):
            pass
        self._seal()
        self._write_status()
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
            self._enter(left)
            while self._drain(_BATCH):
                pass
            self._leave("server_gone")
            left.unlink()
        if self._ring_path.exists():
            self._enter(self._ring_path)

    def _enter(self, path: Path) -> None:
        try:
            ring = Ring.open(path)
        except RingUnusable as error:
            self._say("%s", error)
            return
        log.info("reading %s, target %s", path, ring.stream.target_digest)
        self._reader = RingReader(ring)
        self._assembler = Assembler(ring.stream, self._max_tokens)
        ring.beat()

    def _leave(self, reason: str) -> None:
        if self._reader is None or self._assembler is None:
            return
        self._assembler.drop_all(reason)
        self._seal()
        for key, count in self._assembler.dropped.items():
            self._dropped[key] = self._dropped.get(key, 0) + count
        self._reader.ring.close()
        self._reader = self._assembler = None

    def _drain(self, records: int) -> bool:
        if self._reader is None or self._assembler is None:
            return False
        for done in range(records):
            try:
                record = self._reader.peek()
            except RingUnusable as error:
                log.error("%s; its unread records are given up", error)
                self._assembler.drop_all("ring_broken")
                self._reader.skip_all()
                return False
            if record is None:
                return done > 0
            for sample in self._assembler.take(record):
                self._store(sample)
            self._reader.advance(record)
        return True

    def _store(self, sample: Sample) -> None:
        assert self._reader is not None and self._assembler is not None
        try:
            self._segment = self._segment or SegmentWriter(self._folder, self._reader.ring.stream)
            self._segment.append(sample)
            self._samples += 1
        except OSError as error:
            self._assembler.count("spool_disk")
            self._say("%s: cannot write samples: %s; they are dropped and counted", self._folder, error)
            return
        if self._segment.bytes >= self._segment_bytes:
            self._seal()

    def _seal_if_due(self) -> None:
        if self._segment and time.monotonic() - self._segment.created >= self._segment_seconds:
            self._seal()

    def _seal(self) -> None:
        if self._segment is None or time.monotonic() - self._failed < 1.0:
            return
        try:
            if self._segment.samples:
                path = self._segment.seal()
                self._segments += 1
                samples, size = self._segment.samples, self._segment.bytes
                log.info("sealed %s: %d samples, %d bytes", path.name, samples, size)
            else:
                self._segment.abandon()
        except OSError as error:
            self._failed = time.monotonic()
            self._say("%s: cannot seal a segment: %s; trying again", self._folder, error)
            return
        self._segment = None
        self._write_status()

    def _write_status(self) -> None:
        """What `tide samples stats` shows: counters since this process started."""
        dropped = dict(self._dropped)
        for key, count in (self._assembler.dropped if self._assembler else {}).items():
            dropped[key] = dropped.get(key, 0) + count
        status = {"pid": os.getpid(), "at": time.time(), "dropped": dropped}
        status |= {"samples": self._samples, "segments": self._segments}
        temporary = self._folder / f"{STATUS_FILE}.new"
        try:
            temporary.write_text(json.dumps(status))
            temporary.rename(self._folder / STATUS_FILE)
        except OSError as error:
            self._say("%s: %s", temporary, error)

    def _say(self, message: str, *values: object) -> None:
        """An error that repeats is said once a period."""
        if time.monotonic() - self._said > _SAY_SECONDS or not self._said:
            self._said = time.monotonic()
            log.error(message, *values)


def sealed_segments(folder: Path) -> list[Path]:
    """Segments that wait for ingest, oldest first."""
    return sorted(folder.glob(f"*{SEALED}"))


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def main(arguments: list[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT, then drains, seals and returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tide_platform.capture.spool")
    parser.add_argument("--ring", type=Path, required=True, help="the ring's file; may appear later")
    parser.add_argument("--folder", type=Path, required=True, help="where segments are written")
    parser.add_argument("--segment-bytes", type=int, default=32 << 20)
    parser.add_argument("--segment-seconds", type=float, default=2.0)
    parser.add_argument("--max-sample-tokens", type=int, default=4096)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        spool = Spool(
            options.ring,
            options.folder,
            options.segment_bytes,
            options.segment_seconds,
            options.max_sample_tokens,
        )
    except TideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    spool.recover()
    while not stop.is_set():
        if not spool.step():
            stop.wait(IDLE_SECONDS)
    spool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
