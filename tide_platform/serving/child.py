"""Starts a program that dies with its parent: ``python child.py SIGNAL NICE PROGRAM ARGS...``.

A parent that is killed runs no handler, so the kernel itself must end its children. Set between fork and exec
by a program of its own, because running Python between the two in a process with threads may hang. Standard
library only and run by path, so that it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def stub(on_parent_death: signal.Signals, nice: int = 0) -> list[str]:
    """What goes before a command line: it then gets the signal when the thread that started it ends."""
    return [sys.executable, "-SE", __file__, on_parent_death.name, str(nice)]


def die_with(parent: int, on_parent_death: signal.Signals) -> None:
    """Asks the kernel for the signal; Linux only, elsewhere nothing is done. Raises ``OSError``.

    ``parent`` is the expected parent's process id: one that died before the call is noticed, and ends us.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if libc and libc.prctl(_PR_SET_PDEATHSIG, on_parent_death):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with(os.getppid(), signal.Signals[sys.argv[1]])
    os.nice(int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
