"""Checkpoints: whole or passed over with the reason said; the journal: a step once, in order."""

import json
import os
from pathlib import Path

import pytest
import torch

from tide_platform.training import checkpoints
from tide_platform.training.checkpoints import (
    FACTS,
    MARKER,
    TENSORS,
    CheckpointNotWritten,
    newest_checkpoint,
    write_checkpoint,
)
from tide_platform.training.progress import Journal, JournalDamaged, JournalNotWritten, StepRecord


def write(root: Path, step: int) -> Path:
    return write_checkpoint(root, step, {"w": torch.full((64,), float(step))}, {"of": "this test"})


def record(step: int, loss: float = 1.5) -> StepRecord:
    return StepRecord(step, 9, 0, loss, [loss], [0.1], 1e-3, 0.7, 8, 100 * step, 0.5, 0.1, 0.2)


def test_what_was_written_is_read_and_two_are_kept(tmp_path: Path) -> None:
    for step in (3, 7, 12):
        write(tmp_path, step)
    found, passed_over = newest_checkpoint(tmp_path, 12)
    assert found and not passed_over and (found.step, found.facts["of"]) == (12, "this test")
    assert torch.equal(found.tensors()["w"], torch.full((64,), 12.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007", "step-00000012"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / MARKER).unlink(), "no COMPLETE: its writer died"),
        (lambda folder: (folder / MARKER).write_text(""), "COMPLETE does not fit state.json"),
        (lambda folder: os.truncate(folder / TENSORS, 100), "100 bytes of"),
        (lambda folder: os.truncate(folder / FACTS, 10), "COMPLETE does not fit state.json"),
        (lambda folder: (folder / FACTS).unlink(), "state.json"),
        (
            lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-1] + b"\1"),
            "wrong checksum",
        ),
    ],
)
def test_a_damaged_one_is_passed_over_by_name_and_an_older_one_serves(tmp_path: Path, damage, reason) -> None:
    write(tmp_path, 3)
    damage(write(tmp_path, 7))
    found, passed_over = newest_checkpoint(tmp_path, 99)
    assert found and found.step == 3
    assert len(passed_over) == 1 and passed_over[0].startswith("step-00000007: ") and reason in passed_over[0]
    write(tmp_path, 5)  # the run went on from 3: what is ahead goes, what it came from stays
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000005"]


def test_one_ahead_of_the_acknowledged_steps_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 7)
    found, passed_over = newest_checkpoint(tmp_path, 5)
    assert found and found.step == 3 and "ahead of the 5 acknowledged" in passed_over[0]
    assert newest_checkpoint(tmp_path / "nowhere", 5) == (None, [])


def test_what_a_dead_writer_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".step-00000004.1.tmp"
    left.mkdir()
    (write(tmp_path, 4) / MARKER).unlink()
    assert newest_checkpoint(tmp_path, 9)[0] is None
    write(tmp_path, 4)
    found, _ = newest_checkpoint(tmp_path, 9)
    assert found and found.step == 4 and not left.exists()


def test_a_full_disk_is_named_and_leaves_the_older_one(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path, 3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "_fill", full)
    with pytest.raises(CheckpointNotWritten, match=r"step 7 could not be written: No space .* make room"):
        write(tmp_path, 7)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_the_journal_reads_back_and_cuts_what_was_never_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "run" / "steps.jsonl"
    journal = Journal(path)
    for step in (1, 2):
        journal.append(record(step))
    journal.close()
    with path.open("ab") as file:
        file.write(json.dumps(record(3).to_json()).encode()[:20])
    again = Journal(path)
    assert again.records == [record(1), record(2)] and again.cut_bytes == 20
    again.append(record(3))
    again.close()
    assert [r.step for r in Journal(path).records] == [1, 2, 3]


@pytest.mark.parametrize("line", ['{"step": 2}', "nothing", json.dumps(record(2).to_json())])
def test_a_journal_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(record(1).to_json()) + "\n" + json.dumps(record(2).to_json()) + f"\n{line}\n")
    with pytest.raises(JournalDamaged, match=r"line 3.*--fresh"):
        Journal(path)


def test_a_step_that_the_disk_refuses_is_not_acknowledged(tmp_path: Path, monkeypatch) -> None:
    journal = Journal(tmp_path / "steps.jsonl")
    monkeypatch.setattr("tide_platform.training.progress.os.write", lambda *_: 5)
    with pytest.raises(JournalNotWritten, match=r"step 1 could not be acknowledged: No space left"):
        journal.append(record(1))
    assert journal.records == []


def test_times_are_no_difference_between_two_computations() -> None:
    assert record(1).same(StepRecord(**record(1).to_json() | {"seconds": 9.0, "wait_seconds": 3.0}))
    assert not record(1).same(record(1, loss=1.5000001))
