"""The dataset's extent, at the cost of a manifest."""

import time

from tests.synthetic import STREAM, make_sample
from tests.unit.metrics.conftest import Values
from tide_platform.config import Settings
from tide_platform.metrics.dataset import DatasetReader
from tide_platform.store.hidden_states import open_store


def test_rows_version_fragments_and_the_last_commit(settings: Settings, values: Values):
    reader = DatasetReader(settings)
    assert values(reader.read())["tide_dataset_version"] == 0
    store = open_store(settings)
    store.ensure(STREAM)
    store.append([make_sample("one"), make_sample("two", tenant="reference")], ["x"])
    store.append([make_sample("three")], ["y"])
    store.remove(["one"])
    found = values(reader.read())
    tip = store.tip()
    assert (
        (found["tide_dataset_rows"], found["tide_dataset_version"])
        == (2, tip.version)
        == (tip.rows, tip.version)
    )
    assert found["tide_dataset_fragments"] == 2 and found["tide_dataset_data_bytes"] > 0
    assert time.time() - 60 < found["tide_dataset_commit_timestamp_seconds"] < time.time() + 1
    store.append([make_sample("four")], ["z"])
    assert values(reader.read())["tide_dataset_rows"] == 3


def test_a_look_reads_next_to_nothing(settings: Settings):
    """Behind its look for the newest version: nothing, or what that version's manifest takes."""
    writer, reader = open_store(settings), DatasetReader(settings)
    writer.ensure(STREAM)
    writer.append([make_sample("first")], ["x"])
    reader.read()

    def stats() -> int:
        """Reads of files since it was asked last."""
        return reader._store.handle.require().io_stats_incremental().read_iops

    stats()
    reader.read()
    assert stats() == 0
    for number in range(20):
        writer.append([make_sample(f"s{number}")], [f"x{number}"])
    reader.read()
    assert 0 < stats() <= 5
