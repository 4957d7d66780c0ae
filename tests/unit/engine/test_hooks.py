"""Requests on their way from HTTP to the scheduler: what they say of themselves is checked once, for each."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import hooks as module
from tide_platform.engine.hooks import Hooks, has_tools


@pytest.fixture
def hooks() -> Hooks:
    config = EngineConfig.model_construct(
        teacher_k=4, draft_digest="d", ring_path="r", trusted_proxies=["127.0.0.0/8"]
    )
    return Hooks(config, SimpleNamespace(VERSION="0"), list)  # type: ignore[arg-type]


def _http(peer: str = "127.0.0.1", **said: str) -> SimpleNamespace:
    headers = Headers({f"x-tide-{name}": value for name, value in said.items()})
    return SimpleNamespace(client=SimpleNamespace(host=peer), headers=headers)


def _pass(hooks: Hooks, sampling: Any, http: Any, **fields: Any) -> Any:
    """``sampling_params`` as the scheduler would get them."""
    request = SimpleNamespace(sampling_params=sampling, **fields)
    seen = hooks.on_generate(lambda manager, obj, http: obj, None, request, http)
    return seen.sampling_params


def test_a_header_reaches_the_sampling_parameters(hooks: Hooks) -> None:
    params = _pass(hooks, {"temperature": 0, "custom_params": {"mine": 1}}, _http(train="deny", tenant="a"))
    assert params == {
        "temperature": 0,
        "custom_params": {"mine": 1, "tide": {"train": "deny", "tenant": "a"}},
    }


def test_each_request_of_a_batch_is_looked_at(hooks: Hooks) -> None:
    said = [{"custom_params": {"tide": {"train": "deny"}}}, {}, {"custom_params": None}]
    params = _pass(hooks, said, _http(tenant="a"))
    assert [p["custom_params"]["tide"] for p in params] == [
        {"train": "deny", "tenant": "a"},
        {"tenant": "a"},
        {"tenant": "a"},
    ]


def test_requests_that_say_nothing_are_left_as_they_are(hooks: Hooks) -> None:
    sampling = {"temperature": 0}
    assert _pass(hooks, sampling, _http()) is sampling
    assert _pass(hooks, None, _http()) is None
    assert _pass(hooks, [sampling], None) == [sampling]


@pytest.mark.parametrize(
    "http",
    [None, SimpleNamespace(is_disconnected=lambda: False), _http("10.0.0.1"), SimpleNamespace(client=None)],
)
def test_whoever_is_no_trusted_peer_can_only_deny(hooks: Hooks, http: Any) -> None:
    claimed = {"custom_params": {"tide": {"train": "allow", "tenant": "acme"}}}
    assert _pass(hooks, claimed, http)["custom_params"]["tide"] == {"ignored": "untrusted"}
    denied = {"custom_params": {"tide": {"train": "deny"}}}
    assert _pass(hooks, denied, http)["custom_params"]["tide"] == {"train": "deny"}


def test_a_client_cannot_say_what_only_the_hooks_say(hooks: Hooks) -> None:
    forged = {"custom_params": {"tide": {"tool_calls": True}}}
    assert _pass(hooks, forged, _http())["custom_params"]["tide"]["train"] == "deny"


def test_a_chats_tools_are_said(hooks: Hooks) -> None:
    plain = SimpleNamespace(sampling_params={})
    chat = SimpleNamespace(tools=[{"name": "f"}], tool_choice="auto", messages=[])
    got, same = hooks.on_chat(lambda self, request, raw: (plain, request), None, chat, None)
    assert (got, same) == (plain, chat)
    seen = hooks.on_generate(lambda manager, obj, http: obj, None, plain, _http())
    assert seen.sampling_params["custom_params"]["tide"] == {"tool_calls": True}


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        ({"tools": [1], "tool_choice": "auto"}, True),
        ({"tools": [1], "tool_choice": "none"}, False),
        ({"tools": None, "messages": [SimpleNamespace(role="user")]}, False),
        ({"messages": [SimpleNamespace(role="tool")]}, True),
        ({"messages": [SimpleNamespace(role="assistant", tool_calls=[1])]}, True),
        ({"messages": [SimpleNamespace(role="assistant", tool_calls=None)]}, False),
    ],
)
def test_what_counts_as_tool_traffic(chat: dict, expected: bool) -> None:
    assert has_tools(SimpleNamespace(**chat)) == expected


def test_the_peers_address_is_the_connections_own(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn puts X-Forwarded-For in its place where this variable lets it."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setattr(module.routes, "add", lambda *_: None)
    hooks.sglang = SimpleNamespace(  # type: ignore[assignment]
        VERSION="0", application=lambda: None, link=lambda manager: None, protect=None
    )
    allowed = hooks.on_http_server(lambda *_: os.environ["FORWARDED_ALLOW_IPS"], None, None)
    assert allowed == ""
