"""What ``tide serve`` starts ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tide_platform.config import Settings
from tide_platform.serving.processes import end_tree, start_child, tail, tree
from tide_platform.serving.serve import AlreadyServing, _state_lock

# a child that has a child, and hears no SIGTERM
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import signal, sys, time
from pathlib import Path
from tide_platform.serving.processes import start_child
child = start_child([sys.executable, "-c", "import time; time.sleep(60)"], Path(sys.argv[1]), {},
                    on_parent_death=signal.SIGKILL)
time.sleep(0.5)
print(child.pid, flush=True)
time.sleep(60)
"""


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def test_a_tree_is_ended_whole(tmp_path):
    log = tmp_path / "log"
    child = start_child([sys.executable, "-c", STUBBORN], log, {}, on_parent_death=signal.SIGKILL)
    wait_for(lambda: "up" in tail(log) and len(tree(child.pid)) == 2)
    members = tree(child.pid)
    end_tree(child, [], patience_s=0.2)
    assert child.returncode == -signal.SIGKILL
    assert not any(member.is_running() for member in members)


def test_a_child_may_let_others_go_first(tmp_path):
    tell = "import os; print(os.nice(0)); print(open('/proc/self/autogroup').read())"
    for nice in (0, 10):
        log = tmp_path / f"log-{nice}"
        child = start_child([sys.executable, "-c", tell], log, {}, on_parent_death=signal.SIGKILL, nice=nice)
        child.wait(20)
        own, *session = log.read_text().split()
        assert int(own) == nice
        assert session[:1] == [] or "autogroup" not in session[0] or session[-1] == str(nice)


def test_orphans_that_were_seen_earlier_are_ended_too(tmp_path):
    log = tmp_path / "log"
    child = start_child([sys.executable, "-c", STUBBORN], log, {}, on_parent_death=signal.SIGKILL)
    wait_for(lambda: "up" in tail(log) and len(tree(child.pid)) == 2)
    members = tree(child.pid)
    child.kill()
    child.wait()
    end_tree(child, members, patience_s=0.2)
    assert not any(member.is_running() for member in members)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's PR_SET_PDEATHSIG")
def test_children_do_not_outlive_a_killed_parent(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_environment_and_log(tmp_path):
    log = tmp_path / "logs" / "a.log"
    script = "import os; print('said', os.environ['TIDE_TEST_WORD'])"
    child = start_child(
        [sys.executable, "-c", script], log, {"TIDE_TEST_WORD": "hello"}, on_parent_death=signal.SIGTERM
    )
    assert child.wait() == 0
    assert tail(log) == "said hello" and os.environ.get("TIDE_TEST_WORD") is None
    assert tail(log, start=log.stat().st_size) == "" and tail(tmp_path / "none") == ""


def test_one_server_a_state_folder(tmp_path):
    settings = Settings(state=tmp_path)
    with (
        _state_lock(settings),
        pytest.raises(AlreadyServing, match=rf"pid {os.getpid()}"),
        _state_lock(settings),
    ):
        pass
