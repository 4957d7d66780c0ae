"""Locks of files between processes: the kernel ends one when its holder dies, however it dies."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tide_platform.config.errors import TideError

_POLL_SECONDS = 0.05


class LockHeld(TideError):
    """Another process holds the lock."""

    def __init__(self, path: Path, pid: int | None, waited: float):
        who = f"process {pid}" if pid else "another process"
        after = f" after {waited:.0f} s" if waited else ""
        super().__init__(f"{path}: {who} holds this lock{after}; wait for it to end, or stop it")
        self.path, self.pid = path, pid


@contextlib.contextmanager
def locked(path: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Holds ``path``, an own file made where it is not there, until the block ends. Raises :class:`LockHeld`
    where another process has it for longer than ``wait_seconds``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(path, descriptor, wait_seconds)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(path: Path, descriptor: int, wait_seconds: float) -> None:
    end = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= end:
                holder = os.pread(descriptor, 20, 0).strip()
                pid = int(holder) if holder.isdigit() else None
                raise LockHeld(path, pid, wait_seconds) from error
        time.sleep(min(_POLL_SECONDS, max(0.0, end - time.monotonic())))
