"""Starts a program that dies with its parent: ``python child.py SIGNAL NICE PROGRAM ARGS...``.

A parent that is killed runs no handler, so the kernel itself must end its children. Set between fork and exec
by a program of its own, because running Python between the two in a process with threads may hang. Standard
library only and run by path, so that it costs milliseconds.
"""

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_SESSION = "/proc/self/autogroup"


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


def step_back(nice: int) -> None:
    """Lets others go first. Where the kernel shares processors out by session (``sched_autogroup_enabled``),
    a process's own number counts within its session only, so one that leads a session gives it to all of it.
    """
    os.nice(nice)
    if nice and os.getsid(0) == os.getpid():
        # not there without such a kernel; changed ten times a second it is refused, then the own number holds
        with contextlib.suppress(OSError):
            group = os.open(_SESSION, os.O_WRONLY)
            os.write(group, str(nice).encode())
            os.close(group)


if __name__ == "__main__":
    die_with(os.getppid(), signal.Signals[sys.argv[1]])
    step_back(int(sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
