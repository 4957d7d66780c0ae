"""Nothing is left behind: leftovers are found by their mark, children end with their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tide_platform.local.errors import StackBusy
from tide_platform.local.interrupt import Interrupted, interruptible
from tide_platform.local.leftovers import end_leftovers, find_leftovers
from tide_platform.local.services import MARK
from tide_platform.local.stack import Stack
from tide_platform.serving import child as child_module


def _sleeper(state: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(state)}, start_new_session=True)


def test_leftovers_are_those_of_this_state(tmp_path: Path) -> None:
    ours, other = _sleeper(tmp_path / "a"), _sleeper(tmp_path / "b")
    try:
        assert find_leftovers(tmp_path / "a") == [ours.pid]
        assert end_leftovers(tmp_path / "a") == [ours.pid]
        assert ours.wait(5) is not None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert end_leftovers(tmp_path / "a") == []


def test_the_second_signal_does_not_interrupt_the_cleaning() -> None:
    cleaned = False
    with pytest.raises(Interrupted), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            cleaned = True
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_a_guarded_child_ends_with_its_parent() -> None:
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([*{child_module.stub(signal.SIGTERM)!r}, 'sleep', '60'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 10
    while b"sleep\x0060" not in Path(f"/proc/{child}/cmdline").read_bytes()[:9]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while _alive(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    from tide_platform.config import Settings

    settings = Settings.model_validate({})
    settings.state = tmp_path
    first, second = Stack(settings), Stack(settings)
    first.layout.make()
    first._take_lock()
    with pytest.raises(StackBusy, match=str(os.getpid())):
        second._take_lock()
    running = _sleeper(tmp_path)
    second.down()
    assert running.poll() is None, "the refused one ended what is not its own"
    first.down()
    assert running.poll() is not None
    second._take_lock()
    second.down()
