"""A trainer that is killed again and again ends with the draft of one that was not; no step is told twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tide_platform.config import draft_digest
from tide_platform.training.job import TrainJob

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

KILLS, STEPS, SEED = 14, 180, 11
RUN = "from tide_platform.cli import main; main()"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    from tiny_job import tiny_job

    return tiny_job(
        tmp_path_factory.mktemp("killed"), epochs=45, learning_rate=1e-3, reference_ratio=1.0,
        checkpoint_seconds=0.0, cache_bytes=1 << 20,
    )  # fmt: skip


class Life:
    """One process of `tide train`."""

    def __init__(self, job_file: Path):
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, "train", "--job", str(job_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.events: list[dict] = []

    def until(self, new_steps: int) -> None:
        """Reads what it tells until so many new steps, or its end."""
        assert self.process.stdout
        while new_steps and (line := self.process.stdout.readline()):
            new_steps -= self._heard(line) == "step"

    def end(self, number: signal.Signals | None = None) -> str:
        """Kills it, or waits; what it said on stderr."""
        if number is not None:
            self.process.send_signal(number)
        assert self.process.stdout and self.process.stderr
        for line in self.process.stdout:  # not communicate(): it would miss what readline() has buffered
            self._heard(line)
        err = self.process.stderr.read()
        self.process.wait(60)
        return err

    def _heard(self, line: str) -> str:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # killed in the middle of a line
            return ""
        self.events.append(event)
        return event["event"]


@pytest.fixture(scope="module")
def undisturbed(job: TrainJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Digest and losses of the run that nobody killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job.model_copy(update={"out": folder / "out"}).write(folder / "job.json")
    life = Life(folder / "job.json")
    err = life.end()
    assert life.process.returncode == 0, err
    assert of(life.events, "step") == list(range(1, STEPS + 1)) and not of(life.events, "past_step")
    losses = [event["loss"] for event in life.events if event["event"] == "step"]
    return draft_digest(folder / "out" / "draft"), losses


def of(events: list[dict], name: str) -> list[int]:
    return [event["step"] for event in events if event["event"] == name]


def _lines(path: Path) -> list[dict]:
    """Whole lines: a writer that was killed may have left a part of one."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def test_killed_at_random_points(job: TrainJob, undisturbed: tuple[str, list[float]], tmp_path: Path) -> None:
    rng = random.Random(SEED)
    job.write(tmp_path / "job.json")
    told: list[dict] = []
    journal = job.out / "run" / "steps.jsonl"
    for _ in range(KILLS):
        life = Life(tmp_path / "job.json")
        steps = rng.choice([0, 1, 1, 2, 5, 20])
        life.until(steps)
        time.sleep(rng.uniform(0, 0.05) if steps else rng.uniform(0, 3))  # 0: before the first step, mostly
        err = life.end(rng.choice([signal.SIGKILL] * 4 + [signal.SIGTERM]))
        assert life.process.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM), err
        assert "Traceback" not in err and "rounding" not in err, err
        acknowledged = _lines(journal)
        told += life.events
        # whatever anybody was told of is in the journal, as it was told, and nothing was passed over
        new = of(life.events, "step")
        assert not new or new == list(range(new[0], new[0] + len(new)))
        for event in life.events:
            if event["event"] == "step":
                assert {k: v for k, v in event.items() if k != "event"} == acknowledged[event["step"] - 1]
    last = Life(tmp_path / "job.json")
    err = last.end()
    assert last.process.returncode == 0, err
    told += last.events

    steps = of(told, "step")
    assert len(steps) == len(set(steps))  # told once
    done = last.events[-1]
    assert done["event"] == "done" and done["steps"] == STEPS
    # one that was acknowledged but died before it could be told is told of as past
    assert set(steps) | set(of(last.events, "past_step")) == set(range(1, STEPS + 1))
    acknowledged = _lines(journal)
    assert [record["step"] for record in acknowledged] == list(range(1, STEPS + 1))

    digest, losses = undisturbed
    assert done["digest"] == draft_digest(job.out / "draft") == digest
    assert [record["loss"] for record in acknowledged] == losses


def test_its_checkpoints_damaged_it_begins_anew_and_ends_the_same(
    job: TrainJob, undisturbed: tuple[str, list[float]], tmp_path: Path
) -> None:
    """Truncated, or without a marker: passed over with the reason, all steps computed again."""
    mine = job.model_copy(update={"out": tmp_path / "out"})
    mine.write(tmp_path / "job.json")
    life = Life(tmp_path / "job.json")
    life.until(100)
    life.end(signal.SIGKILL)
    found = sorted((tmp_path / "out" / "run").glob("step-*"))
    assert found
    os.truncate(found[-1] / "state.safetensors", 1000)
    for older in found[:-1]:
        (older / "COMPLETE").unlink()
    life = Life(tmp_path / "job.json")
    err = life.end()
    assert life.process.returncode == 0, err
    assert f"{found[-1].name}: state.safetensors: 1000 bytes of" in err
    assert draft_digest(tmp_path / "out" / "draft") == undisturbed[0]
    told = of(life.events, "past_step") + of(life.events, "step")
    assert told == list(range(1, STEPS + 1)) and life.events[-1]["replayed"] > 0
