"""Files written with O_DIRECT by a thread of their own: the page cache would copy every byte once more.

A :class:`DirectFile` gathers small parts in an aligned slot and takes large aligned arrays as they are, so
that one ``pwritev`` carries a few MiB. Its space is reserved first: a full disk is met before a byte is
accepted, and what is accepted can only fail for a moment (it is tried again until it works).
"""

import contextlib
import errno
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = 4096
SLOT_BYTES = 4 << 20
_SLOTS = 3
_BATCH_BYTES = 8 << 20  # a write carries about so many
_BATCH_PARTS = 256
_LARGE = 1 << 16  # bytes from which an aligned array is written from where it is
_RETRY_SECONDS = 1.0
_WAIT_SECONDS = 0.2
_SAY_SECONDS = 30.0
SPARE_FILE = "spool.spare"
log = logging.getLogger("tide.spool")


def aligned(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] at a page's beginning."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]


def written_in_place(array: np.ndarray) -> bool:
    """Whether a file takes the array's bytes from where they lie."""
    return array.nbytes >= _LARGE and array.ctypes.data % PAGE == 0 and array.flags.c_contiguous


@dataclass(frozen=True)
class _Space:
    """An open file with its space reserved."""

    path: Path
    descriptor: int
    direct: bool
    bytes: int


class Disk:
    """Does jobs in threads of its own, in their order; one that fails with ``OSError`` is tried again until
    it works or :meth:`close` gives it up. Writes have one thread; what waits for the file system's journal
    (sealing, reserving space) has another. Holds the slots that small parts are gathered in.
    """

    def __init__(self, waiting: Callable[[], None] = lambda: None) -> None:
        """``waiting`` is called now and then while :meth:`slot` has none to give, and may raise."""
        self._waiting = waiting
        self.errors = 0  # jobs that had to be tried again
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._open = 0
        self._idle = threading.Condition()
        self._given_up = threading.Event()
        self._fault: Exception | None = None
        self._said = 0.0
        self._spare: _Space | None = None
        self._preparing = False
        for _ in range(_SLOTS):
            self._free.put(aligned(SLOT_BYTES))
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        for name in ("spool-write", "spool-seal"):
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            self._threads.append(threading.Thread(target=self._run, args=(jobs,), name=name, daemon=True))
            self._threads[-1].start()

    def check(self) -> None:
        """Raises what ended a job and was no ``OSError``: a fault of ours, after which nothing is certain."""
        if self._fault:
            raise self._fault

    def write(self, job: Callable[[], None]) -> None:
        self._submit(job, 0)

    def seal(self, job: Callable[[], None]) -> None:
        """After the writes submitted so far."""
        self._submit(lambda: self._submit(job, 1), 0)

    def prepare(self, folder: Path, nbytes: int) -> None:
        """Reserves the space of the next file now; where it is not to be had, the file itself meets that."""
        if self._preparing or self._spare:
            return
        self._preparing = True
        self._submit(lambda: self._prepare(folder / SPARE_FILE, nbytes), 1)

    def take_spare(self) -> _Space | None:
        spare, self._spare = self._spare, None
        return spare

    def slot(self) -> np.ndarray:
        """Waits for a free one: jobs that are done give theirs back."""
        while True:
            try:
                return self._free.get(timeout=_WAIT_SECONDS)
            except queue.Empty:
                self.check()
                self._waiting()

    def free(self, slot: np.ndarray) -> None:
        self._free.put(slot)

    def wait(self, seconds: float | None = None) -> bool:
        """Until all jobs are done; ``False`` where the time was too short."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, seconds)

    def close(self, seconds: float = 10.0) -> bool:
        """Waits for all jobs; ``False`` where some were given up."""
        done = self.wait(seconds)
        self._given_up.set()
        for jobs, thread in zip(self._queues, self._threads, strict=True):
            jobs.put(None)
            thread.join()
        if spare := self.take_spare():
            os.close(spare.descriptor)
            spare.path.unlink(missing_ok=True)
        return done

    def _submit(self, job: Callable[[], None], which: int) -> None:
        with self._idle:
            self._open += 1
        self._queues[which].put(job)

    def _run(self, jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
        while job := jobs.get():
            while not self._given_up.is_set():
                try:
                    job()
                    break
                except OSError as error:
                    self._failed(error)
                except Exception as error:  # noqa: BLE001 (raised by `check`, in the thread that ends us)
                    self._fault = error
                    self._given_up.set()
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    def _failed(self, error: OSError) -> None:
        self.errors += 1
        if time.monotonic() - self._said > _SAY_SECONDS or not self._said:
            self._said = time.monotonic()
            log.error("%s; trying again, the server is not held up", error)
        self._given_up.wait(_RETRY_SECONDS)

    def _prepare(self, path: Path, nbytes: int) -> None:
        try:
            path.unlink(missing_ok=True)
            self._spare = _reserved(path, nbytes)
        except OSError as error:
            log.info("%s: no space ahead: %s", path, error)
        finally:
            self._preparing = False


def _create(path: Path) -> tuple[int, bool]:
    """A new file, and whether its file system takes O_DIRECT."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # made all the same by some
    return os.open(path, flags, 0o600), False


def _reserved(path: Path, nbytes: int) -> _Space:
    descriptor, direct = _create(path)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return _Space(path, descriptor, direct, nbytes)


class DirectFile:
    """An append-only file, readable by its owner alone. ``reserve_bytes`` are taken from the disk at once.

    Raises ``OSError`` where they are not to be had and ``least_bytes`` are neither; the file is then gone.
    """

    def __init__(self, path: Path, disk: Disk, reserve_bytes: int, least_bytes: int):
        self.path, self.length = path, 0
        self._handed = 0  # bytes of it that the disk's thread has
        self._disk, self._slot = disk, disk.slot()
        try:
            if spare := disk.take_spare():
                spare.path.rename(path)
                self._descriptor, self.direct, self._reserved = spare.descriptor, spare.direct, spare.bytes
            else:
                (self._descriptor, self.direct), self._reserved = _create(path), 0
        except OSError:
            disk.free(self._slot)
            raise
        try:
            self.reserve(least_bytes, reserve_bytes)
        except OSError:
            self.abandon()
            raise
        self._parts: list[np.ndarray] = []  # of the batch, all but the last a multiple of a page long
        self._after: list[Callable[[], None]] = []
        self._batch_at = self._begin = self._fill = 0  # file offset of the batch; the piece of the slot in it

    def reserve(self, least_bytes: int, wanted_bytes: int = 0) -> None:
        """Takes space for ``least_bytes`` more, or ``wanted_bytes`` in all where the disk has them. Raises
        ``OSError``; the file is as it was.
        """
        needed = self.length + least_bytes + PAGE
        if needed <= self._reserved:
            return
        for size in sorted({max(needed, wanted_bytes), needed}, reverse=True):
            try:
                os.posix_fallocate(self._descriptor, 0, size)
            except OSError as error:
                if size > needed and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                    continue
                with contextlib.suppress(OSError):  # what was taken of it before the disk was full
                    os.ftruncate(self._descriptor, self._reserved)
                raise
            self._reserved = size
            return

    def append(self, part: np.ndarray, after: Callable[[], None] | None = None) -> None:
        """uint8 [n] at the file's end. Copied, or, where :func:`written_in_place` and the file's length is a
        multiple of a page, read until ``after`` is called (by the disk's thread).
        """
        if written_in_place(part) and (self._fill - self._begin) % PAGE == 0:
            whole = part.nbytes // PAGE * PAGE
            self._end_piece()
            for first in range(0, whole, _BATCH_BYTES):
                self.length += min(whole - first, _BATCH_BYTES)
                self._parts.append(part[first : min(whole, first + _BATCH_BYTES)])
                self._flush_if_full()
            part = part[whole:]
        while part.nbytes:
            count = min(part.nbytes, SLOT_BYTES - self._fill)
            self._slot[self._fill : self._fill + count] = part[:count]
            self._fill += count
            self.length += count  # as far as it was taken: a flush in between hands over so much
            part = part[count:]
            if self._fill == SLOT_BYTES:
                self.flush()
        if after:
            self._after.append(after)
        self._flush_if_full()

    def flush(self) -> None:
        """Hands what was gathered to the disk's thread, the unfinished last page included: it is written
        again with what follows.
        """
        if self._handed == self.length:
            if self._after:  # of a part that filled its batch to the byte: all of it is with the thread
                after, self._after = self._after, []
                self._disk.write(lambda: _call(after))
            return
        self._handed = self.length
        tail = (self._fill - self._begin) % PAGE
        slot, fill, begin = self._slot, self._fill, self._begin
        if tail:
            padded = fill + PAGE - tail
            slot[fill:padded] = 0
            parts = [*self._parts, slot[begin:padded]]
        else:
            parts = [*self._parts, slot[begin:fill]] if fill > begin else self._parts
        at, after = self._batch_at, self._after
        self._batch_at += sum(part.nbytes for part in parts) - (PAGE if tail else 0)
        self._slot = self._disk.slot()
        if tail:
            self._slot[:tail] = slot[fill - tail : fill]
        self._parts, self._after, self._begin, self._fill = [], [], 0, tail
        self._disk.write(lambda: self._write(at, parts, slot, after))

    def seal(self, then: Callable[[], None]) -> None:
        """Cuts the file to its length, makes it durable and closes it; then calls ``then``, all by the
        disk's thread.
        """
        self.flush()
        self._disk.free(self._slot)
        self._disk.seal(lambda: self._seal(then))

    def abandon(self) -> None:
        """Removes the file: nothing is in it."""
        os.close(self._descriptor)
        self._disk.free(self._slot)
        self.path.unlink()

    def _end_piece(self) -> None:
        if self._fill > self._begin:
            self._parts.append(self._slot[self._begin : self._fill])
            self._begin = self._fill

    def _flush_if_full(self) -> None:
        gathered = sum(part.nbytes for part in self._parts) + self._fill - self._begin
        if gathered >= _BATCH_BYTES or len(self._parts) >= _BATCH_PARTS:
            self.flush()

    def _write(
        self, at: int, parts: list[np.ndarray], slot: np.ndarray, after: list[Callable[[], None]]
    ) -> None:
        views = [part.data for part in parts]
        while views:
            done = os.pwritev(self._descriptor, views, at)
            at += done
            while views and done >= views[0].nbytes:
                done -= views.pop(0).nbytes
            if done:
                views[0] = views[0][done:]
        self._disk.free(slot)
        _call(after)

    def _seal(self, then: Callable[[], None]) -> None:
        os.ftruncate(self._descriptor, self.length)
        os.fsync(self._descriptor)
        then()
        os.close(self._descriptor)


def _call(after: list[Callable[[], None]]) -> None:
    for call in after:
        call()
