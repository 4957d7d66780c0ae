"""``tide train`` as a child process: its step records handed on, its end understood."""

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

from tide_platform.config import TideError
from tide_platform.serving import child

PATIENCE_S = 20.0  # between asking the trainer to end and ending it


class TrainingFailed(TideError):
    """The trainer's process ended with an error."""

    def __init__(self, status: int, last_words: str):
        how = f"exit status {status}"
        if status < 0:
            how = f"killed by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -9 else "")
        super().__init__(
            f"tide train: {how}: {last_words or 'it said nothing'}; all it printed is in the run log"
        )
        self.status, self.last_words = status, last_words


def run_trainer(
    argv: Sequence[str],
    env: Mapping[str, str],
    on_step: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> None:
    """Run ``argv``, which prints JSON lines; each step's record, also of steps that an earlier process of the
    same run did, goes to ``on_step``, every line to stdout.

    ``stop()`` is asked about once a second; true ends the trainer early. Raises :class:`TrainingFailed`.
    Whatever ends this function ends the process.
    """
    last: deque[str] = deque(maxlen=1)
    with _process(argv, env) as process:
        for line in _lines(process, stop):
            record = _record(line)
            if record is not None and record.get("event") in ("step", "past_step"):
                on_step(record)
            elif record is None and line.strip():
                last.append(line.strip())
            print(line, flush=True)
        status = process.wait()
    if status != 0:
        raise TrainingFailed(status, last[0] if last else "")


@contextmanager
def _process(argv: Sequence[str], env: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    # a killed run takes its trainer with it
    process = subprocess.Popen(
        [*child.stub(signal.SIGTERM), *argv],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _lines(process: "subprocess.Popen[str]", stop: Callable[[], bool]) -> Iterator[str]:
    """The process's lines until it closes its output; asks it to end once ``stop()`` is true."""
    lines: Queue[str | None] = Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, name="trainer output", daemon=True).start()
    asked = False
    while True:
        if not asked and stop():
            asked = True
            process.terminate()
        try:
            line = lines.get(timeout=1.0)
        except Empty:
            continue
        if line is None:
            return
        yield line


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None
