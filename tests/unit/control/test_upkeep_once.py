"""One whole pass of upkeep, as the schedule starts it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.upkeep import maintain_once
from tide_platform.store.hidden_states import open_store
from tide_platform.store.lease import StoreLease
from tide_platform.store.objects import ObjectStore
from tide_platform.store.upkeep import LEASE_SECONDS

DAY = 86400.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(state=tmp_path)
    settings.storage.uri = str(tmp_path / "store")
    settings.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    settings.retention.days = 5
    store = open_store(settings)
    store.ensure(STREAM)
    for name, age in (("old", 9), ("young", 1)):
        store.append([make_sample(name, captured_at=time.time() - age * DAY)], [name])
    return settings


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = Ledger(settings.ledger.url)
    yield ledger
    ledger.close()


def live(ledger: Ledger, number: int, at: float) -> None:
    one = {
        "number": number, "at": at, "tenant": "default", "draft": "d", "straddles": False, "prompt_tokens": 4,
        "tokens": 8, "rounds": 4, "accepted": 4, "token_ms": 5.0, "concurrency": 1.0, "reason": "stop",
    }  # fmt: skip
    told = {"draft": "d", "started_at": 1.0, "missed": 0, "requests": [one], "rounds_by_batch": {}}
    ledger.history.record("demo", "http://a", told)


def test_samples_expire_and_the_history_is_thinned(settings: Settings, ledger: Ledger) -> None:
    hour = (time.time() - 3 * DAY) // 3600 * 3600
    for number in (1, 2, 3):
        live(ledger, number, hour + number)
    done = maintain_once(settings, ledger)
    assert done["dataset"] == "kept up"
    assert (done["expired_samples"], done["history_rows_saved"], done["failures"]) == (1, 2, 0)
    assert [ref.sample_id for ref in open_store(settings).refs()] == ["young"]
    again = maintain_once(settings, ledger)
    assert (again["dataset"], again["expired_samples"], again["history_rows_saved"]) == ("kept up", 0, 0)


def test_it_waits_for_another_process_and_gives_way_at_last(settings: Settings, ledger: Ledger) -> None:
    other = StoreLease(ObjectStore(settings.storage), "demo/leases/maintain", LEASE_SECONDS)
    assert other.try_hold()
    slept: list[float] = []
    clock = iter(range(0, 1000, 50))
    done = maintain_once(
        settings, ledger, patience_s=120, sleep=slept.append, monotonic=lambda: float(next(clock))
    )
    assert done["dataset"] == "another process keeps it up" and done["expired_samples"] == 0
    assert len(slept) == 2
