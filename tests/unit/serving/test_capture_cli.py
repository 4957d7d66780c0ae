"""``tide capture``: what it asks of the server, and what it prints."""

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tide_platform.cli.capture import command
from tide_platform.serving import client as client_module


class FakeServer:
    """The server's state of capture, changed as the server does."""

    asked: list[dict[str, Any]]

    def __init__(self, *_: object) -> None:
        self.state = STATE

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None: ...

    def status(self) -> dict[str, Any]:
        return {"capture": self.state}

    def capture(self, **changes: Any) -> dict[str, Any]:
        FakeServer.asked.append(changes)
        return self.state | changes


STATE: dict[str, Any] = {
    "enabled": True,
    "error": None,
    "default": "allow",
    "sampling_rate": 1.0,
    "bytes_per_second": None,
    "deny_tenants": ["acme"],
    "allow_tenants": None,
    "samples": 3,
    "open": 1,
    "bytes": 5000,
    "dropped": {},
    "skipped": {"opt_out": 2, "budget": 1},
    "ignored": {"untrusted": 4},
}


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setenv("TIDE_ADMIN_KEY", "unit")
    monkeypatch.setattr(client_module, "SglangClient", FakeServer)
    FakeServer.asked = []
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(options), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_without_options_it_only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run(monkeypatch).splitlines()
    assert FakeServer.asked == []
    assert shown == [
        "capture         on",
        "default         allow",
        "sampling rate   1",
        "bytes a second  no limit",
        "denied tenants  acme",
        "samples         3 (1 open, 5000 bytes written)",
        "skipped         budget 1, opt_out 2",
        "not believed    untrusted 4",
    ]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["off"], {"enabled": False}),
        (["on", "--sampling-rate", "0.5"], {"enabled": True, "sampling_rate": 0.5}),
        (["--default", "deny"], {"default": "deny"}),
        (["--bytes-per-second", "0"], {"bytes_per_second": 0}),
        (["--bytes-per-second", "-1"], {"bytes_per_second": None}),
        (["--deny-tenant", "b", "--undeny-tenant", "acme"], {"deny_tenants": ["b"]}),
        (["--deny-tenant", "b", "--deny-tenant", "a"], {"deny_tenants": ["a", "acme", "b"]}),
        (["--only-tenant", "b"], {"allow_tenants": ["b"]}),
        (["--all-tenants"], {"allow_tenants": None}),
    ],
)
def test_changes_are_asked_for_by_name(
    monkeypatch: pytest.MonkeyPatch, options: list[str], asked: dict[str, Any]
) -> None:
    run(monkeypatch, *options)
    assert FakeServer.asked == [asked]


def test_a_server_that_cannot_capture_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "STATE", {"live": False, "enabled": False, "error": None})
    assert "captures nothing" in run(monkeypatch)
