"""The plugin's routes on an application of their own: keys, checks before the pause, the pause itself."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from safetensors.torch import save_file

from tide_platform.config import draft_digest
from tide_platform.config.engine import EngineConfig
from tide_platform.engine import routes

KEY = "unit-key"
AUTHORISED = {"Authorization": f"Bearer {KEY}"}


class FakeScheduler:
    """Remembers in which order it was paused, asked and resumed."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.is_paused = False
        self.fault: Exception | None = None
        self.says: dict[str, Any] = {"ok": True, "adapter": "unit", "copy_s": 0.1, "ranks": ["sum"]}

    async def call(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.events.append(message)
        if self.fault:
            raise self.fault
        return [self.says]

    def paused(self) -> bool:
        return self.is_paused

    async def pause(self) -> None:
        self.events.append("pause")

    async def resume(self) -> None:
        self.events.append("resume")


def _draft(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"fc.weight": torch.randn(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 2, "draft_vocab_size": 4}))
    return folder


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def app(tmp_path: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv(routes.KEY_VARIABLE, KEY)
    return _application(tmp_path, scheduler, [])


def _application(tmp_path: Path, scheduler: FakeScheduler, protected: list[Any]) -> TestClient:
    served = _draft(tmp_path / "served")
    config = EngineConfig.model_construct(draft_digest="d", drafts_root=tmp_path / "drafts")
    arguments = SimpleNamespace(admin_api_key=None, speculative_draft_model_path=str(served))
    application = FastAPI()
    routes.add(application, scheduler, config, "0.0", arguments, protected.append)
    return TestClient(application, raise_server_exceptions=False)


ROUTES = [
    ("GET", "/tide/status", None),
    ("POST", "/tide/capture", {"enabled": True}),
    ("POST", "/tide/reload_draft", {"path": "/", "digest": "x"}),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer no"}, {"Authorization": KEY}])
def test_the_key_is_asked_for(
    app: TestClient, scheduler: FakeScheduler, method: str, path: str, body: Any, header: dict
) -> None:
    reply = app.request(method, path, json=body, headers=header)
    assert reply.status_code == 401 and routes.KEY_VARIABLE in reply.text
    assert scheduler.events == []


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_a_server_without_a_key_refuses_and_says_how_to_set_one(
    tmp_path: Path,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    body: Any,
) -> None:
    monkeypatch.setenv(routes.KEY_VARIABLE, "")
    protected: list[Any] = []
    app = _application(tmp_path, scheduler, protected)
    for header in ({}, {"Authorization": "Bearer "}, AUTHORISED):
        reply = app.request(method, path, json=body, headers=header)
        assert reply.status_code == 403 and routes.KEY_VARIABLE in reply.text
    assert protected == [] and scheduler.events == []


def test_status_reports_what_the_scheduler_says(app: TestClient) -> None:
    reply = app.get("/tide/status", headers=AUTHORISED).json()
    assert (reply["sglang"], reply["adapter"]) == ("0.0", "unit") and reply["pid"]


@pytest.mark.parametrize(
    ("says", "status"),
    [
        ({"adapter": "unit", "missing_hooks": []}, 200),
        ({"adapter": "unit", "missing_hooks": [], "capture": {"live": False, "error": "no ring"}}, 200),
        ({"adapter": "unit", "missing_hooks": ["verify"]}, 503),
        ({"error": "scheduler is gone", "type": "InternalError"}, 503),
    ],
)
def test_readiness_needs_no_key_and_tells_nothing_else(
    app: TestClient, scheduler: FakeScheduler, says: dict[str, Any], status: int
) -> None:
    scheduler.says = says
    reply = app.get("/tide/ready")
    assert (reply.status_code, reply.json()) == (status, {"ready": status == 200})


def test_a_reload_is_checked_before_the_pause(
    app: TestClient, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    body = {"path": str(_draft(tmp_path / "outside")), "digest": "x"}
    reply = app.post("/tide/reload_draft", headers=AUTHORISED, json=body)
    assert reply.status_code == 400 and reply.json()["type"] == "DraftOutsideRoot"
    assert scheduler.events == []


def _reload(app: TestClient, tmp_path: Path) -> Any:
    folder = _draft(tmp_path / "drafts" / "new")
    body = {"path": str(folder), "digest": draft_digest(folder)}
    return app.post("/tide/reload_draft", headers=AUTHORISED, json=body)


def test_a_reload_pauses_and_resumes(app: TestClient, scheduler: FakeScheduler, tmp_path: Path) -> None:
    reply = _reload(app, tmp_path).json()
    assert reply["ok"] and reply["pause_s"] >= 0 and reply["ignored_tensors"] == []
    before, message, settled, after = scheduler.events
    assert (before, after) == ("pause", "resume") and message["op"] == "reload"
    assert settled == {"op": "settle", "keep": True}


def test_the_server_runs_on_after_a_fault(app: TestClient, scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.fault = RuntimeError("scheduler gone")
    assert _reload(app, tmp_path).status_code == 500
    assert scheduler.events[-1] == "resume"


def test_a_pause_of_somebody_else_stays(app: TestClient, scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.is_paused = True
    assert _reload(app, tmp_path).json()["ok"]
    assert "resume" not in scheduler.events and "pause" not in scheduler.events


BAD_RULES = [
    {"sampling_rate": 2},
    {"enable": True},
    {"enabled": None},
    {"default": "maybe"},
    {"bytes_per_second": -1},
    {"allow_tenants": "acme"},
]


@pytest.mark.parametrize("body", BAD_RULES)
def test_capture_takes_known_values_only(app: TestClient, scheduler: FakeScheduler, body: dict) -> None:
    assert app.post("/tide/capture", headers=AUTHORISED, json=body).status_code == 422
    assert scheduler.events == []


def test_capture_hands_on_what_was_given_and_no_more(app: TestClient, scheduler: FakeScheduler) -> None:
    body = {"enabled": False, "bytes_per_second": None, "deny_tenants": ["acme"]}
    assert app.post("/tide/capture", headers=AUTHORISED, json=body).status_code == 200
    assert scheduler.events == [{"op": "capture"} | body]
