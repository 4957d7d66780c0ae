"""What is told of that stands as it should not: servers, capture, rollouts, live speed."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tide_platform.cluster.discovery import ServersMissing
from tide_platform.config import Settings
from tide_platform.control import standing as module
from tide_platform.control.ledger import Ledger
from tide_platform.control.rollouts import Order
from tide_platform.control.speed import NAME as SPEEDUP
from tide_platform.control.standing import standing
from tide_platform.serving.client import ServerUnreachable


class Server:
    """``capture``: what its status tells of it; None: it does not answer."""

    def __init__(self, url: str, capture: dict[str, Any] | None):
        self.base_url, self._capture = url, capture

    def status(self) -> dict[str, Any]:
        if self._capture is None:
            raise ServerUnreachable(self.base_url, OSError("refused"))
        return {"draft_digest": "d", "capture": self._capture}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state=tmp_path)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=lambda: 1000.0)
    yield ledger
    ledger.close()


def look(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, *servers: Server, now: float = 1000.0
) -> dict[str, str]:
    monkeypatch.setattr(module, "glance_at_all", lambda _: nullcontext(list(servers)))
    return {name: f"{m.title}: {m.body}" for name, m in standing(settings, ledger, now).items()}


def test_servers_and_their_capture(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = Server("http://a", {"live": True, "enabled": True, "error": None})
    off = Server("http://b", {"live": True, "enabled": False, "error": None})  # by hand
    dead = Server("http://c", {"live": False, "enabled": False, "error": "RuntimeError: no ring"})
    gone = Server("http://d", None)
    found = look(settings, ledger, monkeypatch, well, off, dead, gone)
    assert list(found) == ["capture http://c", "server http://d"]
    assert "RuntimeError: no ring; restart the server" in found["capture http://c"]
    assert "refused" in found["server http://d"]
    settings.capture.enabled = False
    assert look(settings, ledger, monkeypatch, dead) == {}


def test_without_an_admin_key_no_server_can_be_asked(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDE_ADMIN_KEY", raising=False)
    assert "no admin key" in standing(settings, ledger, 1000.0)["servers"].body


def test_servers_that_a_cluster_lacks(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Settings, _found: int) -> None:
        raise ServersMissing("tide-sglang", 1, 2, {"tide-sglang-1": "sglang: CrashLoopBackOff"})

    monkeypatch.setattr(module, "require_all", missing)
    (text,) = look(settings, ledger, monkeypatch).values()
    assert text.startswith("demo: 1 of 2 servers are ready") and "CrashLoopBackOff" in text


def test_a_rollout_that_stands_still(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.rollouts.begin("demo", Order("new", "ann@host", "better"), "old", ["http://a"])
    assert look(settings, ledger, monkeypatch) == {}
    (text,) = look(settings, ledger, monkeypatch, now=1000.0 + settings.notify.patience_s).values()
    assert "the rollout of draft new is unfinished: it stands at step canary for 300 s" in text


def test_speculation_that_costs_more_than_it_brings(
    settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.controls.put("demo", SPEEDUP, {"1": 1.3, "8": 0.83})
    (text,) = look(settings, ledger, monkeypatch).values()
    assert "0.83 with 8 requests at a time" in text and "1.30" not in text
    ledger.controls.put("demo", SPEEDUP, {"1": 1.3, "8": 1.0})
    assert look(settings, ledger, monkeypatch) == {}
