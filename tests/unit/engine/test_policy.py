"""The operator's rules and the budget: which requests are captured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.engine.policy import Budget, Policy, Request, fraction


def _request(rid: str = "r", prompt_tokens: int = 3, **options: object) -> Request:
    return Request(rid, prompt_tokens, temperature=0.0, top_p=1.0, top_k=1, options=dict(options))


def _policy(**changed: object) -> Policy:
    return Policy(**{"enabled": True, "default": "allow", "sampling_rate": 1.0, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ({}, {}, None),
        ({}, {"train": "deny"}, "opt_out"),
        ({"default": "deny"}, {}, "opt_out"),
        ({"default": "deny"}, {"train": "allow"}, None),
        ({"deny_tenants": frozenset({"acme"})}, {"tenant": "acme", "train": "allow"}, "tenant"),
        ({"allow_tenants": frozenset({"acme"})}, {"tenant": "acme"}, None),
        ({"allow_tenants": frozenset({"acme"})}, {}, "tenant"),
        (
            {"allow_tenants": frozenset({"acme"}), "deny_tenants": frozenset({"acme"})},
            {"tenant": "acme"},
            "tenant",
        ),
        ({"sampling_rate": 0.0}, {}, "sampled_out"),
        ({"enabled": False}, {}, "disabled"),
        ({"max_request_tokens": 3}, {}, None),
        ({"max_request_tokens": 2}, {}, "too_long"),
        ({"budget": Budget(0)}, {}, "budget"),
    ],
)
def test_the_first_rule_that_is_not_passed_is_named(policy: dict, options: dict, reason: str | None) -> None:
    assert _policy(**policy).refusal(_request(**options)) == reason


def test_unsupported_requests_are_refused_by_their_name() -> None:
    assert _policy().refusal(Request("r", 3, 0.0, 1.0, 1, unsupported="lora")) == "lora"


@given(st.lists(st.text(), min_size=1, max_size=50, unique=True), st.floats(0, 1))
def test_sampling_depends_on_the_root_alone(roots: list[str], rate: float) -> None:
    policy = _policy(sampling_rate=rate)
    for root in roots:
        decisions = {policy.refusal(_request(rid, conversation=root)) for rid in ("a", "b", "c")}
        assert len(decisions) == 1 or not root  # an empty conversation is none: the request's id counts
        assert 0 <= fraction(root) < 1


def test_a_root_that_is_no_text_is_hashed_all_the_same() -> None:
    assert 0 <= fraction("\ud800") < 1


def test_sampling_keeps_about_the_rate() -> None:
    policy = _policy(sampling_rate=0.3)
    kept = sum(policy.refusal(_request(f"r{i}")) is None for i in range(4000))
    assert 0.27 < kept / 4000 < 0.33


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5000)), min_size=1, max_size=60),
)
def test_the_budget_holds_over_any_stretch_of_time(rate: int, arrivals: list[tuple[float, int]]) -> None:
    """Whatever arrives when: what is admitted is at most the rate, a second's burst and one last request."""
    clock = Clock()
    budget = Budget(rate, clock)
    start, written, last = clock.now, 0, 0
    for pause, size in arrivals:
        clock.now += pause
        if budget.admits():
            budget.debit(size)
            written, last = written + size, size
    assert written - last <= rate * (1 + clock.now - start) + 1e-3


def test_a_debt_is_paid_before_the_next_request() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    assert budget.admits()
    budget.debit(350)  # all of one request, whatever its size
    clock.now += 2.4
    assert not budget.admits()
    clock.now += 0.2
    assert budget.admits()


def test_a_budget_can_be_lifted_and_closed() -> None:
    budget = Budget(10)
    budget.debit(1000)
    assert not budget.admits()
    budget.set(None)
    assert budget.admits()
    budget.set(0)
    assert not budget.admits()


def test_rules_change_by_name() -> None:
    policy = _policy()
    policy.change({"op": "capture", "default": "deny", "deny_tenants": ["b", "a"], "bytes_per_second": 5})
    policy.change({"allow_tenants": ["a"]})
    status = policy.status()
    assert (status["enabled"], status["default"], status["sampling_rate"]) == (True, "deny", 1.0)
    assert (status["deny_tenants"], status["allow_tenants"]) == (["a", "b"], ["a"])
    assert status["bytes_per_second"] == 5
    policy.change({"allow_tenants": None, "bytes_per_second": None, "enabled": False, "sampling_rate": 0.5})
    status = policy.status()
    assert (status["allow_tenants"], status["bytes_per_second"]) == (None, None)
    assert (status["enabled"], status["sampling_rate"]) == (False, 0.5)
