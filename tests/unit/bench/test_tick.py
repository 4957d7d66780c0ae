"""The benchmark of ticks, in small, and its history."""

from pathlib import Path

from tide_platform.bench.tick import TICKS, _history, run
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.states import State


def test_each_kind_of_tick_is_timed_and_nothing_is_left(tmp_path: Path) -> None:
    report = run(tmp_path / "tick", windows=3, commits=5)
    assert set(report.ratios) == {"idle", "landed", "cut"} and min(report.ratios.values()) > 0
    assert all(len(seconds) == TICKS for seconds in report.raw["seconds"].values())
    assert not (tmp_path / "tick").exists()


def test_the_history_is_of_windows_at_their_end(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    _history(ledger, Settings(deployment="bench"), 7, 20, 20)
    records = ledger.windows("bench")
    assert [record.state for record in records] == [State.FAILED] * 7
    assert sum(record.samples for record in records) == 20 and ledger.scan("bench").last_row == 19
    ledger.close()
