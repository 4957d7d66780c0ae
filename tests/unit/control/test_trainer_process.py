"""The trainer's process: records, its last words, and that it never outlives its caller's interest."""

import sys
import time
from typing import Any

import pytest

from tide_platform.control.trainer_process import TrainingFailed, run_trainer


def run(script: str, stop: Any = lambda: False) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    run_trainer([sys.executable, "-c", script], {"GREETING": "hello"}, steps.append, stop)
    return steps


def test_step_records_are_handed_on_and_other_lines_printed(capfd: pytest.CaptureFixture[str]):
    steps = run(
        "import os, json; print(json.dumps({'event': 'step', 'step': 1}));"
        "print(os.environ['GREETING']); print('{broken')"
    )
    assert steps == [{"event": "step", "step": 1}]
    assert "hello" in capfd.readouterr().out


def test_the_last_words_are_the_reason():
    with pytest.raises(TrainingFailed, match="exit status 2: error: no such draft"):
        run("import sys; print('error: no such draft', file=sys.stderr); sys.exit(2)")


def test_a_killed_trainer_is_named():
    with pytest.raises(TrainingFailed, match="SIGKILL"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_it_ends_when_the_run_lost_its_window():
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match="SIGTERM"):
        run("import time; time.sleep(60)", stop=lambda: True)
    assert time.monotonic() - began < 10
