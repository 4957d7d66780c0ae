"""What is told of servers that answer, refuse, hang and are gone."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.free_ports import free_port
from tests.unit.metrics.conftest import Values
from tide_platform.config import Settings
from tide_platform.metrics.servers import read_servers, told
from tide_platform.serving.admin import AdminKeyMissing

STATUS: dict[str, Any] = {
    "draft_digest": "d1",
    "adapter": "0.5.14",
    "verify_rule": "greedy",
    "reloads": 2,
    "capture": {"enabled": True},
}


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server with this status; its URL."""
    running, let_go = [], threading.Event()

    def start(status: dict[str, Any] | None = None, code: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if status is None:
                    let_go.wait(30)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(status).encode())

            def log_message(self, format: str, *args: Any) -> None:
                assert self.headers["Authorization"] == "Bearer key"

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    let_go.set()
    for server in running:
        server.shutdown()
        server.server_close()


def test_each_server_is_told_of(
    serve: Callable[..., str], settings: Settings, values: Values, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TIDE_ADMIN_KEY", "key")
    settings.metrics.scrape_seconds = 1.0
    fine, hangs, refuses = serve(STATUS), serve(), serve({"error": "no"}, 401)
    gone = f"http://127.0.0.1:{free_port()}"
    settings.rollout.servers = [fine, hangs, refuses, gone]
    began = time.monotonic()
    found = values(read_servers(settings))
    assert time.monotonic() - began < 5
    up = {url: found[f"tide_server_up{{{url}}}"] for url in settings.rollout.servers}
    assert up == {fine: 1, hangs: 0, refuses: 0, gone: 0}
    assert found[f"tide_server_info{{{fine},d1,0.5.14,greedy}}"] == 1
    assert found[f"tide_server_capturing{{{fine}}}"] == 1
    assert found[f"tide_server_reloads_total{{{fine}}}"] == 2
    assert found["tide_servers_agree"] == 0


@pytest.mark.parametrize(
    ("drafts", "agree"), [(["a", "a"], 1), (["a", "b"], 0), (["a", None], 0), ([None, None], 0)]
)
def test_whether_they_agree(drafts: list[str | None], agree: int, values: Values):
    said = {f"http://{n}": STATUS | {"draft_digest": draft} for n, draft in enumerate(drafts)}
    assert values(told(said))["tide_servers_agree"] == agree


def test_without_a_key_nothing_is_asked(settings: Settings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TIDE_ADMIN_KEY", raising=False)
    with pytest.raises(AdminKeyMissing):
        read_servers(settings)
