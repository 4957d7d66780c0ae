"""Starts child processes that cannot outlive their parent, and ends whole process trees."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from tide_platform.serving.child import stub


def start_child(
    argv: Sequence[str], log: Path, env: Mapping[str, str], *, on_parent_death: signal.Signals, nice: int = 0
) -> subprocess.Popen[bytes]:
    """Start ``argv`` in a session of its own, output appended to ``log``; it gets a signal when we die. With
    ``nice`` above 0 others go before it.

    A session of its own: Ctrl-C in the terminal reaches ``tide serve`` alone, which ends things in order.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*stub(on_parent_death, nice), *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )


def tree(pid: int) -> list[psutil.Process]:
    """The process and all that descend from it, those that still live."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_tree(process: subprocess.Popen[bytes], members: Iterable[psutil.Process], patience_s: float) -> None:
    """Ask the process to end, wait, then kill whatever of its tree is left.

    ``members``: its tree as seen earlier; a child that lost its parent is found only by that.
    """
    known = {member.pid: member for member in [*members, *tree(process.pid)] if member.pid != process.pid}
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    process.kill()
    process.wait(10)  # before psutil looks at others: it would reap this one, and its status be lost
    for member in known.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()  # psutil checks that the pid is still that process
    psutil.wait_procs(list(known.values()), timeout=10)


def tail(path: Path, lines: int = 15, start: int = 0) -> str:
    """The last lines of a log, of what was written after byte ``start``."""
    try:
        with path.open("rb") as file:
            file.seek(max(start, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])
