"""Starts a program that ends with the process that started it: ``python guard.py NICE PROGRAM ARGS...``.

A kill -9 of the supervisor would otherwise leave its services behind. Standard library only and run by path,
so that it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGTERM when the parent thread ends; Linux only, elsewhere nothing is done.

    ``parent`` is the expected parent's process id: a parent that died before the call is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    os.nice(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
