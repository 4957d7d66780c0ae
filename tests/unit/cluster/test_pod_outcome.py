"""Progress and result are what the run's folder shows."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pod_trainer import _finish

from tide_platform.cluster.failures import FailureFiles
from tide_platform.cluster.faults import ResultMissing
from tide_platform.cluster.outcome import StepFollower, read_result


def line(step: int, run: str = "a") -> str:
    return json.dumps({"step": step, "run": run}) + "\n"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "steps.jsonl"


def follow(out: Path) -> tuple[StepFollower, list[tuple[int, str]]]:
    told: list[tuple[int, str]] = []
    return StepFollower(out, lambda record: told.append((record["step"], record.get("run", "")))), told


def test_only_whole_lines_are_read_and_each_once(journal: Path, tmp_path: Path) -> None:
    follower, told = follow(tmp_path)
    follower.poll()
    journal.write_text(line(1) + line(2)[:7])
    follower.poll()
    assert told == [(1, "a")]
    journal.write_text(line(1) + line(2) + line(3))
    follower.poll()
    follower.poll()
    assert told == [(1, "a"), (2, "a"), (3, "a")]


def test_steps_of_an_earlier_attempt_are_told_once_the_trainer_goes_on(journal: Path, tmp_path: Path) -> None:
    journal.write_text(line(1) + line(2))
    follower, told = follow(tmp_path)
    follower.poll()
    assert told == []
    journal.write_text(line(1) + line(2) + line(3))
    follower.poll()
    assert [step for step, _ in told] == [1, 2, 3]


@pytest.mark.parametrize("longer", [False, True])
def test_a_run_begun_anew_is_told_anew(journal: Path, tmp_path: Path, longer: bool) -> None:
    journal.write_text("")
    follower, told = follow(tmp_path)
    journal.write_text(line(1) + line(2))
    follower.poll()
    journal.write_text(line(1, "b") + (line(2, "b") + line(3, "b") if longer else ""))
    follower.poll()
    assert told[2:] == [(1, "b"), (2, "b"), (3, "b")][: 3 if longer else 1]


def test_what_a_shared_volume_shows_torn_is_read_at_the_next_poll(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower, told = follow(tmp_path)
    journal.write_text(line(1))
    follower.poll()
    journal.write_bytes(line(1).encode() + b"\0" * (len(line(2)) - 1) + b"\n")  # its length before its bytes
    follower.poll()
    assert told == [(1, "a")]
    journal.write_text(line(1) + line(2))
    for error in (FileNotFoundError(2, "gone"), OSError(errno.ESTALE, "Stale file handle")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", _raises(error))
            follower.poll()
    assert told == [(1, "a")]
    follower.poll()
    assert told == [(1, "a"), (2, "a")]


def test_what_is_read_torn_from_its_beginning_is_not_told_twice(journal: Path, tmp_path: Path) -> None:
    follower, told = follow(tmp_path)
    journal.write_text(line(1) + line(2))
    follower.poll()
    whole = line(1) + line(2) + line(3)
    journal.write_bytes(b"\0" * (len(whole) - 1) + b"\n")
    follower.poll()
    journal.write_text(whole)
    follower.poll()
    assert [step for step, _ in told] == [1, 2, 3]


def test_an_error_of_whoever_is_told_is_not_taken_for_the_volumes(journal: Path, tmp_path: Path) -> None:
    follower = StepFollower(tmp_path, _raises(ValueError("of the caller's")))
    journal.write_text(line(1))
    with pytest.raises(ValueError, match="of the caller's"):
        follower.poll()


def _raises(error: Exception) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_failures_are_those_since_the_attempt_began_the_earliest_first(journal: Path, tmp_path: Path) -> None:
    def write(rank: int, kind: str, at: float) -> None:
        record = {"rank": rank, "kind": kind, "text": f"of {rank}", "at": at}
        (journal.parent / f"failed-{rank}.json").write_text(json.dumps(record))

    write(0, "OutOfMemory", 1.0)
    write(1, "OutOfMemory", 2.0)
    files = FailureFiles(tmp_path)
    assert files.read() == []
    (journal.parent / "failed-9.json").write_text('{"rank": 9, "ki')  # not whole yet
    write(1, "RuntimeError", 8.0)
    write(2, "OutOfMemory", 7.0)
    assert [(each.rank, each.kind, each.text) for each in files.read()] == [
        (2, "OutOfMemory", "of 2"),
        (1, "RuntimeError", "of 1"),
    ]
    assert FailureFiles(tmp_path / "nowhere").read() == []


def test_of_a_run_that_was_finished_the_result_tells_all(tmp_path: Path, journal: Path) -> None:
    journal.write_text(line(1))
    follower, told = follow(tmp_path)
    _finish(tmp_path, 2, [{"step": 1}, {"step": 2}])
    follower.finish(read_result(tmp_path, 0))
    assert [step for step, _ in told] == [1, 2]


def _weights(out: Path) -> None:
    (out / "draft" / "model.safetensors").write_bytes(b"others")


def _parent(out: Path) -> None:
    (out / "draft" / "tide.json").write_text(json.dumps({"parent": "another"}))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda out: (out / "result.json").unlink(), "result.json is not there"),
        (lambda out: (out / "result.json").write_text("{}"), "is of another release"),
        (lambda out: (out / "draft" / "tide.json").unlink(), "tide.json is not there"),
        (lambda out: (out / "draft" / "config.json").unlink(), "is not whole (config.json)"),
        (_weights, "is not the draft"),
        (_parent, "trained from another, not from parent"),
    ],
)
def test_a_result_counts_only_with_its_checkpoint(tmp_path: Path, damage: Any, what: str) -> None:
    _finish(tmp_path, 1, [{"step": 1}])
    assert read_result(tmp_path, 0).steps == 1
    damage(tmp_path)
    with pytest.raises(ResultMissing) as error:
        read_result(tmp_path, 0)
    assert what in str(error.value)
