"""SIGINT, SIGTERM and SIGHUP as one exception, raised once: what cleans up is not interrupted again."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_STATUS = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The user or the system asked this process to end.

    A KeyboardInterrupt, so that nobody handles it by accident and asyncio hands it on as it is.
    """


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block, the first of the signals raises :class:`Interrupted` in the main thread.

    Later ones are ignored, so that the ending in order that the first one caused runs to its end; it is
    bounded in time. Must be entered in the main thread.
    """

    def first(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted

    before = {number: signal.signal(number, first) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
