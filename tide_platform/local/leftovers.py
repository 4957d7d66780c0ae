"""Finds and ends processes of a stack whose owner is gone, by the mark in their environment."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from tide_platform.local.services import MARK


def find_leftovers(state: Path) -> list[int]:
    """Process ids of what belongs to the stack of ``state``; this process and its parents are left out."""
    import psutil

    me = psutil.Process()
    spare = {me.pid, *(parent.pid for parent in me.parents())}
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        if process.pid in spare or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            marked = process.environ().get(MARK) == str(state)
        except (psutil.Error, OSError):  # another user's, or it ended meanwhile
            continue
        if marked:
            found.append(process.pid)
    return found


def end_leftovers(state: Path, grace_s: float = 10.0) -> list[int]:
    """SIGTERM to all processes of the stack of ``state``, SIGKILL to those that stay; returns their ids."""
    import psutil

    ended: list[int] = []
    for grace in (grace_s, 2.0):  # twice: a process may have started another while it ended
        processes = [psutil.Process(pid) for pid in find_leftovers(state) if psutil.pid_exists(pid)]
        if not processes:
            break
        ended += [process.pid for process in processes]
        for process in processes:
            _signal(process.terminate)
        _, alive = psutil.wait_procs(processes, timeout=grace)
        for process in alive:
            _signal(process.kill)
        psutil.wait_procs(alive, timeout=5)
    return ended


def _signal(send: Callable[[], None]) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        send()
