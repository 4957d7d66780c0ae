"""``tide train`` under torchrun: killed, and taken up again by another number of processes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tide_platform.config import draft_digest
from tide_platform.draft.checkpoint import load_draft
from tide_platform.training.job import RESULT, TrainJob, TrainResult
from tide_platform.training.progress import JOURNAL
from tide_platform.training.run import run_job

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
from tiny_job import tiny_job

LONG = {"epochs": 10, "checkpoint_seconds": 0.0, "autocast": False}


def start(job: TrainJob, size: int, *options: str) -> "subprocess.Popen[str]":
    path = job.out.with_name("job.json")
    job.write(path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return subprocess.Popen(
        [*launcher, "-m", "tide_platform", "train", "--job", str(path), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps(text: str) -> list[int]:
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [record["step"] for record in records if record["event"] == "step"]


def wait_for_steps(journal: Path, least: int) -> None:
    until = time.monotonic() + 120
    while not journal.is_file() or journal.read_bytes().count(b"\n") < least:
        assert time.monotonic() < until, "no step was acknowledged"
        time.sleep(0.02)


def test_a_killed_process_ends_the_run_and_four_go_on(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, parallel="shard", **LONG)
    begun = start(job, 2)
    wait_for_steps(job.out / "run" / JOURNAL, 6)
    # the second process, which keeps nothing on disk
    (victim,) = [
        child for child in psutil.Process(begun.pid).children() if child.environ().get("RANK") == "1"
    ]
    victim.kill()
    out, _ = begun.communicate(timeout=120)
    told = steps(out)
    assert begun.returncode != 0 and 6 <= len(told) < 40 and not (job.out / RESULT).exists()

    again = start(job, 4)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert told + steps(out) == list(range(1, 41))
    result = TrainResult.read(job.out / RESULT)
    assert result is not None and result.processes == 4
    assert result.digest == draft_digest(job.out / "draft")
    assert json.loads((job.out / "draft" / "tide.json").read_text())["machine"]["processes"] == 4

    alone = run_job(job.model_copy(update={"out": tmp_path / "alone"}))
    assert [r["loss"] for r in result.history] == pytest.approx([r["loss"] for r in alone.history], rel=1e-3)
    ours, theirs = (load_draft(folder).state_dict() for folder in (result.folder, alone.folder))
    assert all((ours[name].float() - theirs[name].float()).abs().max() < 5e-3 for name in ours)

    done = start(job, 2)  # finished: every process finds the result
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0 and steps(out) == [], err


def test_a_process_that_sees_another_job_is_named(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, epochs=1)
    job.write(tmp_path / "0.json")
    job.model_copy(update={"seed": 4}).write(tmp_path / "1.json")
    code = (
        "import os, runpy, sys;"
        f"sys.argv = ['tide', 'train', '--job', {str(tmp_path)!r} + '/' + os.environ['RANK'] + '.json'];"
        "runpy.run_module('tide_platform', run_name='__main__')"
    )
    (tmp_path / "each.py").write_text(code)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(tmp_path / "each.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0 and not (job.out / RESULT).exists()
    assert "error: process 1 of this run differs from the first in seed" in done.stderr
