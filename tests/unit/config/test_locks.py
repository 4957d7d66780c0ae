"""A lock says who holds it, waits as long as it is told, and ends with its holder."""

import os
import subprocess
import sys
import threading
import time

import pytest

from tide_platform.config.locks import LockHeld, locked

HOLDER = """
import sys, time
from pathlib import Path
from tide_platform.config.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield path, process
    process.kill()
    process.wait()


def test_names_the_holder_and_ends_with_it(holder):
    path, process = holder
    with pytest.raises(LockHeld, match=f"process {process.pid}") as caught, locked(path):
        pass
    assert caught.value.pid == process.pid
    process.kill()
    process.wait()
    with locked(path):
        assert path.read_text() == str(os.getpid())


def test_waits(holder):
    path, process = holder
    threading.Timer(0.3, process.kill).start()
    with locked(path, wait_seconds=30):
        pass


def test_gives_up_after_the_time(holder):
    begin = time.monotonic()
    with pytest.raises(LockHeld, match="after 0 s"), locked(holder[0], wait_seconds=0.2):
        pass
    assert time.monotonic() - begin >= 0.2
