"""A deployment with content in its ledger, on both databases; a part's values by name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.control.conftest import ledger_url, postgres
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.metrics.sheet import Sheet

__all__ = ["ledger_url", "postgres"]
NOW = 1_800_000_000.0

Values = Callable[[Sheet], dict[str, float]]


@pytest.fixture
def values() -> Values:
    """``name{label,...}`` -> value, as one dict."""

    def flat(sheet: Sheet) -> dict[str, float]:
        return {
            name + ("{" + ",".join(labels) + "}" if labels else ""): value
            for name, of in sheet.values.items()
            for labels, value in of.items()
        }

    return flat


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(state=tmp_path / "state")
    made.storage.uri = str(tmp_path / "store")
    made.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    return made


@pytest.fixture
def clock() -> list[float]:
    """Its first item is the time."""
    return [NOW]


@pytest.fixture
def ledger(ledger_url: str, clock: list[float]) -> Iterator[Ledger]:
    made = Ledger(ledger_url, clock=lambda: clock[0])
    yield made
    made.close()
