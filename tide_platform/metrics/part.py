"""One part of what the exporter tells: read now and then, by one thread, and never waited for too long."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from sqlalchemy.exc import SQLAlchemyError

from tide_platform.config import TideError
from tide_platform.metrics.sheet import Sheet

log = logging.getLogger("tide.metrics")


class Part:
    """``read`` is called at most every ``every_s`` seconds, and not again before it has returned."""

    def __init__(self, what: str, read: Callable[[], Sheet], every_s: float):
        self.what, self._read, self._every_s = what, read, every_s
        self.unread = 0  # answers without it
        self.seconds: float | None = None  # that the last finished read took
        self._reading: Future[Sheet] | None = None
        self._ended = 0.0
        self._problem: str | None = None  # that was said last
        self._lock = threading.Lock()

    def ask(self) -> Future[Sheet]:
        """The newest read, or the one that is running."""
        with self._lock:
            known = self._reading
            if known is not None and not (known.done() and time.monotonic() - self._ended >= self._every_s):
                return known
            self._reading = future = Future()
            threading.Thread(target=self._run, args=(future,), name=f"read {self.what}", daemon=True).start()
            return future

    def result(self, asked: Future[Sheet], seconds: float) -> Sheet | None:
        """None where it failed, or is not there after ``seconds``; that is counted, and logged once."""
        done = bool(wait([asked], max(0.0, seconds)).done)
        error = asked.exception() if done else None
        problem = str(error) or type(error).__name__ if error else None if done else "it takes too long"
        with self._lock:
            self.unread += problem is not None
            if problem != self._problem:
                self._problem = problem
                log.warning("%s: %s", self.what, f"not read: {problem}" if problem else "is read again")
        return asked.result() if problem is None else None

    def _run(self, future: Future[Sheet]) -> None:
        began = time.monotonic()
        sheet, error = Sheet(), None
        try:
            sheet = self._read()
        except (TideError, SQLAlchemyError, OSError) as expected:
            error = expected
        except Exception as bug:  # in one part: it must not silence the others, nor itself
            log.exception("%s: reading it failed", self.what)
            error = bug
        self._ended = time.monotonic()
        self.seconds = self._ended - began
        if error is None:
            future.set_result(sheet)
        else:
            future.set_exception(error)
