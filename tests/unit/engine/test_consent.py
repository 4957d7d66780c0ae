"""Who is believed about a request, and what happens to the rest."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from tide_platform.engine.consent import MAX_LENGTH, is_trusted, networks, resolve

ACME = {"x-tide-tenant": "acme"}


def _headers(*pairs: tuple[str, str], **named: str) -> Headers:
    raw = [*pairs, *((f"X-TIDE-{name}", value) for name, value in named.items())]
    return Headers(raw=[(name.lower().encode(), value.encode("latin-1")) for name, value in raw])


@pytest.mark.parametrize(
    ("peer", "trusted"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.1.2.3", True),
        ("10.2.0.1", False),
        ("192.168.0.1", False),
        ("::ffff:192.168.0.1", False),
        ("testclient", False),
        ("", False),
        (None, False),
    ],
)
def test_the_peer_is_looked_up_among_the_networks(peer: str | None, trusted: bool) -> None:
    assert is_trusted(peer, networks(["127.0.0.0/8", "::1/128", "10.1.0.0/16"])) == trusted


def test_nobody_is_trusted_where_no_network_is() -> None:
    assert not is_trusted("127.0.0.1", networks([]))


@pytest.mark.parametrize(
    ("headers", "body", "options"),
    [
        (_headers(), None, {}),
        (_headers(train="allow"), None, {"train": "allow"}),
        (_headers(train=" Deny "), None, {"train": "deny"}),
        (
            _headers(tenant="acme", conversation="c-1"),
            None,
            {"tenant": "acme", "conversation": "c-1"},
        ),
        (_headers(), {"train": "allow", "tenant": "acme"}, {"train": "allow", "tenant": "acme"}),
        (_headers(), {"tenant": None}, {}),
        # a proxy that speaks has the last word; a client can only take back
        (_headers(tenant="acme"), {"tenant": "other", "train": "allow"}, {"tenant": "acme"}),
        (_headers(train="allow", tenant="acme"), {"train": "deny"}, {"train": "deny", "tenant": "acme"}),
        (_headers(train="deny"), {"train": "allow"}, {"train": "deny"}),
    ],
)
def test_a_trusted_proxy_is_followed(headers: Headers, body: Any, options: dict) -> None:
    assert resolve(headers, body, trusted=True) == options


@pytest.mark.parametrize(
    ("headers", "body", "options"),
    [
        (_headers(), None, {}),
        (_headers(train="deny"), None, {"train": "deny"}),
        (_headers(), {"train": "deny"}, {"train": "deny"}),
        (_headers(train="allow"), None, {"ignored": "untrusted"}),
        (_headers(tenant="acme"), None, {"ignored": "untrusted"}),
        (_headers(), {"conversation": "c"}, {"ignored": "untrusted"}),
        (
            _headers(tenant="acme"),
            {"train": "deny"},
            {"train": "deny", "ignored": "untrusted"},
        ),
    ],
)
def test_others_can_only_deny(headers: Headers, body: Any, options: dict) -> None:
    assert resolve(headers, body, trusted=False) == options


BAD = [
    (_headers(train="no"), None),
    (_headers(train=""), None),
    (_headers(tenant=""), None),
    (_headers(tenant="a" * (MAX_LENGTH + 1)), None),
    (_headers(tenant="sch\xf6n"), None),
    (_headers(("X-TIDE-Tenant", "a"), ("x-tide-tenant", "b")), None),
    (_headers(("X-TIDE-Train", "allow"), ("X-Tide-Train", "allow")), None),
    (_headers(), "deny"),
    (_headers(), ["deny"]),
    (_headers(), {"tenant": 5}),
    (_headers(), {"train": "sometimes"}),
    (_headers(), {"train": True}),
    (_headers(), {"conversation": "a\nb"}),
    (_headers(), {"conversation": "\ud800"}),
    (_headers(), {"tool_calls": True}),  # the hooks' own word, not a client's
    (_headers(), {"ignored": ["x"]}),
]


@pytest.mark.parametrize(("headers", "body"), BAD)
@pytest.mark.parametrize("trusted", [True, False])
def test_what_cannot_be_read_denies(headers: Headers, body: Any, trusted: bool) -> None:
    options = resolve(headers, body, trusted)
    assert options["train"] == "deny" and "malformed" in options["ignored"]


values = st.one_of(st.none(), st.text(max_size=5), st.integers(), st.sampled_from(["allow", "deny"]))


@given(
    st.lists(
        st.tuples(st.sampled_from(["Train", "Tenant", "Conversation"]), st.text("ad \x00é", max_size=4))
    ),
    st.one_of(values, st.dictionaries(st.sampled_from(["train", "tenant", "conversation", "x"]), values)),
    st.booleans(),
)
def test_nothing_said_raises_and_deny_is_never_lost(
    said: list[tuple[str, str]], body: Any, trusted: bool
) -> None:
    headers = _headers(*((f"X-TIDE-{name}", value) for name, value in said))
    options = resolve(headers, body, trusted)
    assert options.keys() <= {"train", "tenant", "conversation", "ignored"}
    if isinstance(body, dict) and body.get("train") == "deny":
        assert options["train"] == "deny"
    if not trusted:
        assert "tenant" not in options and options.get("train") != "allow"
