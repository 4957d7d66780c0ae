"""Whether a server may take traffic, and that it catches up with a champion that came while it loaded."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.serving.fakes import write_draft
from tide_platform.config import Settings, draft_digest
from tide_platform.serving.client import ServerUnreachable
from tide_platform.serving.drafts import stage_draft
from tide_platform.serving.ready import not_ready
from tide_platform.serving.serve import ChampionNotTaken, Deployment


class Server:
    """A server that answers with ``status``; None: the plugin does not answer."""

    base_url = "http://server"

    def __init__(self, status: dict[str, Any] | None, healthy: bool = True, refuses: str = ""):
        self._status, self._healthy, self.refuses = status, healthy, refuses
        self.reloaded: list[Path] = []

    def healthy(self) -> bool:
        return self._healthy

    def status(self) -> dict[str, Any]:
        if self._status is None:
            raise ServerUnreachable(self.base_url, OSError("404"))
        return self._status

    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]:
        assert self._status is not None
        if self.refuses:
            return {"ok": False}
        self.reloaded.append(path)
        self._status = self._status | {"draft_digest": digest}
        return {"ok": True}


GOOD = {"deployment": "demo", "draft_digest": "champion", "capture": {"live": True}, "missing_hooks": []}


@pytest.mark.parametrize(
    ("server", "drafts", "why"),
    [
        (Server(GOOD), {"champion"}, None),
        (Server(GOOD), set(), None),
        (Server(GOOD, healthy=False), {"champion"}, "/health"),
        (Server(None), {"champion"}, "plugin does not answer"),
        (Server(GOOD | {"deployment": "other"}), {"champion"}, "deployment other"),
        (Server(GOOD | {"capture": {"live": False, "error": "no ring"}}), {"champion"}, "no ring"),
        (Server(GOOD | {"draft_digest": "image"}), {"champion"}, "serves draft image, not champion"),
        (Server(GOOD | {"draft_digest": "new"}), {"champion", "new"}, None),
    ],
)
def test_reasons_against_it(server: Server, drafts: set[str], why: str | None) -> None:
    reasons = "; ".join(not_ready(Settings(), server, drafts))
    assert (why in reasons) if why else reasons == ""


def test_without_speculation_there_is_no_draft_to_be_right() -> None:
    plain = Settings()
    plain.serving.k = 0
    status = GOOD | {"draft_digest": None, "capture": {"live": False}}
    assert list(not_ready(plain, Server(status), {"champion"})) == []


def _deployment(settings: Settings, champion: Any) -> Deployment:
    plan = SimpleNamespace(spool_argv=None)
    checked = SimpleNamespace(draft=SimpleNamespace(digest="image"))
    return Deployment(settings, checked, plan, threading.Event(), lambda _: None, champion)  # type: ignore[arg-type]


def test_a_champion_that_came_while_it_loaded_is_taken(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path / "state")
    folder, digest = stage_draft(settings, write_draft(tmp_path / "new"))
    server = Server(GOOD | {"draft_digest": "image"})
    deployment = _deployment(settings, lambda: folder)
    deployment._catch_up(server)  # type: ignore[arg-type]
    assert server.reloaded == [folder.resolve()] and deployment.draft_digest == digest == draft_digest(folder)
    deployment._catch_up(server)  # type: ignore[arg-type]
    assert len(server.reloaded) == 1, "the draft that it serves is not loaded again"


def test_a_server_that_does_not_take_it_does_not_serve(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path / "state")
    folder, digest = stage_draft(settings, write_draft(tmp_path / "new"))
    server = Server(GOOD | {"draft_digest": "image"}, refuses="no")
    with pytest.raises(ChampionNotTaken, match=digest):
        _deployment(settings, lambda: folder)._catch_up(server)  # type: ignore[arg-type]
