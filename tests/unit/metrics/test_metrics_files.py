"""What is told of the spool's folder, of processes by their status files, and of a training run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic import STREAM, make_sample
from tests.unit.metrics.conftest import NOW, Values
from tide_platform.capture.folder import write_status
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings
from tide_platform.metrics.files import NoSpoolFolder, StatusUnreadable, read_files
from tide_platform.training.progress import Journal, StepRecord

SPOOL: dict[str, Any] = {
    "pid": 7,
    "at": NOW - 1,
    "dropped": {"spool_full": 3},
    "ring_dropped": {"ring_full": 2},
    "samples": 40,
    "segments": 4,
    "bytes": 4000,
    "disk_errors": 1,
    "buffered_segments": 0,
}


@pytest.fixture
def folder(settings: Settings) -> Path:
    settings.spool_folder.mkdir(parents=True)
    return settings.spool_folder


def test_a_machine_without_a_spool_is_told_as_such(settings: Settings):
    with pytest.raises(NoSpoolFolder, match=r"metrics\.parts"):
        read_files(settings)


def test_nothing_has_run_yet(settings: Settings, folder: Path, values: Values):
    found = values(read_files(settings))
    assert found["tide_spool_segments"] == found["tide_spool_set_aside{bad}"] == 0
    assert found["tide_process_alive{spool}"] == found["tide_process_alive{ingest}"] == 0
    assert "tide_process_alive{maintain}" not in found
    assert not [name for name in found if "training" in name or "oldest" in name]


def test_segments_that_wait(settings: Settings, folder: Path, values: Values):
    sizes = []
    for name in ("a", "b"):
        writer = SegmentWriter(folder, STREAM)
        writer.append(make_sample(name))
        path = writer.seal()
        os.utime(path, (NOW - 50, NOW - (100 if name == "a" else 50)))
        sizes.append(path.stat().st_size)
    (folder / "x.refused").touch()
    found = values(read_files(settings))
    assert found["tide_spool_segments"] == 2 and found["tide_spool_bytes"] == sum(sizes)
    assert found["tide_spool_bytes_allowed"] == settings.capture.spool_bytes
    assert found["tide_spool_oldest_timestamp_seconds"] == NOW - 100
    assert (found["tide_spool_set_aside{refused}"], found["tide_spool_set_aside{bad}"]) == (1, 0)


def test_processes_by_their_status_files(settings: Settings, folder: Path, values: Values):
    write_status(folder / "spool.json", SPOOL)
    old = {"pid": 8, "at": NOW - 1000, "samples": 5, "commits": 2, "upkeep_compactions": 3}
    write_status(folder / "ingest.json", old)
    write_status(folder / "ingest-1.json", old | {"at": NOW})
    write_status(settings.state / "maintain.json", {"pid": 9, "at": NOW, "upkeep_vacuums": 1})
    found = values(read_files(settings, lambda: NOW))
    alive = {name: value for name, value in found.items() if name.startswith("tide_process_alive")}
    assert alive == {
        "tide_process_alive{spool}": 1,
        "tide_process_alive{ingest}": 0,
        "tide_process_alive{ingest-1}": 1,
        "tide_process_alive{maintain}": 1,
    }
    assert found["tide_process_seen_timestamp_seconds{ingest}"] == NOW - 1000
    assert found["tide_spool_dropped_total{spool,spool_full}"] == 3
    assert found["tide_spool_ring_dropped_total{spool,ring_full}"] == 2
    assert (
        found["tide_spool_samples_total{spool}"] == 40 and found["tide_spool_disk_errors_total{spool}"] == 1
    )
    assert found["tide_ingest_events_total{ingest,samples}"] == 5
    assert found["tide_upkeep_events_total{ingest-1,compactions}"] == 3
    assert found["tide_upkeep_events_total{maintain,vacuums}"] == 1


def test_a_status_that_cannot_be_read_is_named(settings: Settings, folder: Path):
    (folder / "ingest.json").write_text("{")
    with pytest.raises(StatusUnreadable, match=r"ingest\.json"):
        read_files(settings)


def test_the_run_that_trains_now(settings: Settings, folder: Path, values: Values):
    def step(number: int, **changes: Any) -> StepRecord:
        made = StepRecord(number, 9, 0, 1.5, [1.5], [0.2], 1e-3, 0.7, 8, 100 * number, 4.0, 0.5, 3.5)
        return StepRecord(**made.to_json() | changes)

    for window, steps in (("w00001", 5), ("w00002", 3)):
        journal = Journal(settings.state / "work" / f"demo-{window}" / "run" / "steps.jsonl")
        for number in range(1, steps + 1):
            journal.append(step(number))
        os.utime(journal.path, (NOW, NOW - (100 if window == "w00001" else 10)))
        journal.close()
    found = values(read_files(settings))
    assert found["tide_training_step{w00002}"] == 3 and found["tide_training_steps{w00002}"] == 9
    assert found["tide_training_loss{w00002}"] == 1.5 and found["tide_training_tokens{w00002}"] == 300
    assert found["tide_training_seen_timestamp_seconds{w00002}"] == NOW - 10
    assert "tide_training_step{w00001}" not in found


@pytest.mark.parametrize("torn", [b"", b'{"step": 1', json.dumps({"step": 1}).encode()])
def test_a_step_that_was_not_acknowledged_is_not_told(
    settings: Settings, folder: Path, values: Values, torn: bytes
):
    journal = settings.state / "work" / "demo-w00001" / "run" / "steps.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(torn)
    assert not [name for name in values(read_files(settings)) if "training" in name]
