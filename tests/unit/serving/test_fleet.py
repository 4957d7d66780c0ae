"""Servers that are asked on a sensor's tick."""

import socket
from pathlib import Path

import pytest

from tide_platform.config import Settings
from tide_platform.serving.client import ServerUnreachable
from tide_platform.serving.fleet import glance_at_all


def test_a_server_that_hangs_is_asked_once_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_ADMIN_KEY", "k")
    with socket.create_server(("127.0.0.1", 0)) as hung:
        hung.settimeout(0.5)
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        settings = Settings.model_validate(
            {"state": tmp_path, "rollout": {"servers": [url]}, "watch": {"answer_seconds": 0.2}}
        )
        with glance_at_all(settings) as (server,), pytest.raises(ServerUnreachable, match="timed out"):
            server.status()
        connections = []
        with pytest.raises(TimeoutError):
            while True:
                connections.append(hung.accept()[0])
        for each in connections:
            each.close()
    assert len(connections) == 1
