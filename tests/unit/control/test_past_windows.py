"""Samples of earlier windows: of their training part alone, drawn by the seed, the expired ones counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.config import Settings
from tide_platform.control import dataset
from tide_platform.control.dataset import read_past, read_window
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import Cut, Scan
from tide_platform.control.states import WindowKey
from tide_platform.control.windows import REFERENCE_TENANT
from tide_platform.store.hidden_states import HiddenStates, open_store

WINDOWS, SIZE = 5, 12


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(state=tmp_path)
    settings.storage.uri = str(tmp_path / "store")
    settings.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    settings.training.past_window_ratio, settings.training.epochs = 0.5, 2
    return settings


@pytest.fixture
def store(settings: Settings) -> HiddenStates:
    """Rows 0 .. 3 are reference, then five windows of twelve."""
    store = open_store(settings)
    store.ensure(STREAM)
    store.append([make_sample(f"r{i}", 4, tenant=REFERENCE_TENANT) for i in range(4)], ["reference"])
    store.append([make_sample(f"s{i}", 4) for i in range(WINDOWS * SIZE)], ["traffic"])
    return store


@pytest.fixture
def ledger(settings: Settings, store: HiddenStates) -> Iterator[Ledger]:
    ledger = Ledger(settings.ledger.url)
    version = store.tip().version
    # the first window begins before every row, as the first one of a deployment does
    cuts = [Cut(3 + i * SIZE if i else -1, 3 + (i + 1) * SIZE, version, SIZE, 48) for i in range(WINDOWS)]
    ledger.cut("demo", Scan(), Scan(version, 64, 63, 0), cuts)
    yield ledger
    ledger.close()


def past_of(settings: Settings, ledger: Ledger, window: str) -> dataset.PastData:
    record = ledger.get(WindowKey("demo", window))
    return read_past(settings, ledger, record, read_window(settings, record))


def test_only_what_earlier_windows_trained_on(settings: Settings, ledger: Ledger) -> None:
    allowed: set[str] = set()
    for i in range(1, WINDOWS):
        record = ledger.get(WindowKey("demo", f"w{i:05d}"))
        allowed |= set(read_window(settings, record).division.train)
    last = read_window(settings, ledger.get(WindowKey("demo", "w00005"))).division.train
    past = past_of(settings, ledger, "w00005")
    # enough for every epoch to draw others: two epochs of half the window, rounded up
    assert len(past.train) == 2 * -(-len(last) // 2)
    assert set(past.train) <= allowed and not set(past.train) & set(last)
    assert past.windows == ["w00001", "w00002", "w00003", "w00004"] and past.lost == 0
    assert past_of(settings, ledger, "w00005") == past
    settings.training.seed = 1
    assert past_of(settings, ledger, "w00005").train != past.train


def test_the_first_window_has_no_past_and_a_ratio_of_none_reads_nothing(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert past_of(settings, ledger, "w00001") == dataset.PastData([], [], 0)
    settings.training.past_window_ratio = 0
    assert past_of(settings, ledger, "w00005") == dataset.PastData([], [], 0)


def test_what_expired_is_counted(settings: Settings, store: HiddenStates, ledger: Ledger) -> None:
    store.remove([f"s{i}" for i in range(SIZE)])  # the whole first window
    settings.training.past_window_ratio = 100
    record = ledger.get(WindowKey("demo", "w00003"))
    data = dataset.WindowData(read_window(settings, record).division, store.tip().version, 0)
    past = read_past(settings, ledger, record, data)
    assert past.lost == SIZE and past.windows == ["w00001", "w00002"]
    assert past.train and all(SIZE <= int(name[1:]) < 2 * SIZE for name in past.train)


def test_of_a_long_history_a_few_windows_are_read(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "PAST_WINDOWS", 2)
    past = past_of(settings, ledger, "w00005")
    assert len(past.windows) == 2 and past.windows == sorted(past.windows)
