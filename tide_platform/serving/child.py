"""``python -m tide_platform.serving.child SIGNAL COMMAND...``: become COMMAND, die with the parent.

A killed ``tide serve`` runs no handler, so the kernel itself must end its children. Set between fork and exec
by a program of its own, because running Python between the two in a process with threads may hang.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = os.getppid()
    number = signal.Signals[sys.argv[1]]
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the kernel was told
        sys.exit(1)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
