"""Live requests of two drafts: what is worse is named, what is alike is left alone."""

from typing import Any

import numpy as np
import pytest

from tide_platform.control.watch import MOST, Limits, compare_live, matched, summarize, whole
from tide_platform.evaluation.sequence import mean_bounds

LIMITS = Limits(k=3, confidence=0.99, max_loss=0.05, max_slowdown=0.25, max_aborts=0.05)


def requests(
    rng: np.random.Generator,
    count: int,
    rate: float,
    token_ms: float = 20.0,
    aborts: float = 0.0,
    tenant: str = "ann",
    load: float = 2.0,
) -> list[dict[str, Any]]:
    """Of 30 rounds, in which each draft token is accepted with ``rate``, given that those before were."""
    found = []
    for _ in range(count):
        own = np.clip(rate + rng.normal(0, 0.08), 0.02, 0.98)  # prompts differ
        accepted = int(np.minimum(rng.geometric(1 - own, 30) - 1, 3).sum())
        found.append(
            {
                "rounds": 30,
                "accepted": accepted,
                "token_ms": float(token_ms * rng.lognormal(0, 0.15)),
                "reason": "abort" if rng.random() < aborts else "stop",
                "draft": "d",
                "straddles": False,
                "tenant": tenant,
                "concurrency": load,
            }
        )
    return found


def test_a_draft_that_hits_less_is_found_out() -> None:
    rng = np.random.default_rng(0)
    found = compare_live(requests(rng, 200, 0.5), requests(rng, 80, 0.3), LIMITS)
    assert len(found.worse) == 1 and "acceptance length is at most" in found.worse[0]
    assert found.champion.acceptance_length == pytest.approx(1.85, abs=0.1)


def test_slow_tokens_and_aborts_are_found_out() -> None:
    rng = np.random.default_rng(1)
    champion = requests(rng, 200, 0.5)
    (slow,) = compare_live(champion, requests(rng, 80, 0.5, token_ms=40), LIMITS).worse[:1]
    assert "ms a token, the champion's median" in slow
    mixed = [*requests(rng, 120, 0.5), *requests(rng, 40, 0.5, token_ms=90)]
    assert any("99th percentile" in one for one in compare_live(champion, mixed, LIMITS).worse)
    (aborted,) = compare_live(champion, requests(rng, 80, 0.5, aborts=0.5), LIMITS).worse
    assert "aborted" in aborted


def test_equal_drafts_are_seldom_found_worse_however_often_one_looks() -> None:
    rng = np.random.default_rng(2)
    alarms = 0
    for _ in range(60):
        champion, challenger = requests(rng, 80, 0.45), requests(rng, 80, 0.45)
        looks = (compare_live(champion, challenger[:seen], LIMITS).worse for seen in range(8, 81, 12))
        alarms += any(looks)
    assert alarms <= 2, "1 % of 60, were the traffic no different"


def test_traffic_that_moved_before_the_reload_says_nothing_of_the_draft() -> None:
    """Seen in a soak: a draft that is better on maths, beside the champion's general requests of before."""
    rng = np.random.default_rng(6)
    general = requests(rng, 300, 0.85, tenant="general")
    maths = requests(rng, 120, 0.45, tenant="maths")
    better = requests(rng, 60, 0.55, tenant="maths")
    assert compare_live([*general, *maths], better, LIMITS).worse == []
    worse = requests(rng, 60, 0.02, tenant="maths")
    assert compare_live([*general, *maths], worse, LIMITS).worse
    assert compare_live(general, better, LIMITS).worse == [], "nothing to compare it with"


def test_a_busier_server_is_no_slower_draft() -> None:
    rng = np.random.default_rng(7)
    champion = [*requests(rng, 200, 0.5), *requests(rng, 100, 0.5, token_ms=60, load=16)]
    busy = requests(rng, 80, 0.5, token_ms=60, load=16)
    assert compare_live(champion, busy, LIMITS).worse == []
    assert compare_live(champion, requests(rng, 80, 0.5, token_ms=120, load=16), LIMITS).worse


def test_both_sides_have_the_same_mix_and_the_newest_count() -> None:
    def of(**counts: int) -> list[dict[str, Any]]:
        return [{"tenant": t, "n": n} for t, count in counts.items() for n in range(count)]

    before, now = matched(of(a=100, b=9, c=50), of(a=6, b=3, d=4), lambda one: one["tenant"])
    mix = [[sum(one["tenant"] == t for one in side) for t in "abcd"] for side in (before, now)]
    assert mix == [[18, 9, 0, 0], [6, 3, 0, 0]]
    assert [one["n"] for one in before if one["tenant"] == "a"] == list(range(82, 100))
    before, now = matched(of(a=2), of(a=5), lambda one: one["tenant"])
    assert (len(before), len(now)) == (2, 2), "no more of the challenger's than there are to compare with"
    before, now = matched(of(a=1000), of(a=5), lambda one: one["tenant"])
    assert (len(before), len(now)) == (5 * MOST, 5)


def test_without_requests_nothing_is_shown() -> None:
    rng = np.random.default_rng(3)
    assert compare_live([], requests(rng, 50, 0.1), LIMITS).worse == []
    assert compare_live(requests(rng, 50, 0.9), [], LIMITS).worse == []
    assert summarize([]).acceptance_length is None


def test_only_whole_requests_of_a_draft_count() -> None:
    told = [{"draft": "a", "straddles": False}, {"draft": "a", "straddles": True}, {"draft": "b"}]
    told[2]["straddles"] = False
    assert whole(told, "a") == told[:1]


def test_the_bounds_of_a_mean_hold_at_all_times() -> None:
    rng = np.random.default_rng(4)
    misses = 0
    for _ in range(200):
        x = 2 + 3 * rng.beta(2, 5, 60)
        looks = [mean_bounds(x[:seen], 2, 5, 0.95) for seen in (5, 15, 30, 60)]
        mean = 2 + 3 * 2 / 7
        misses += any(low > mean or high < mean for low, high in looks)
    assert misses <= 20, "two sides of 5 % each, and bets pay for looking"
    low, high = mean_bounds(2 + 3 * rng.beta(2, 5, 4000), 2, 5, 0.95)
    assert high - low < 0.15
    assert mean_bounds(np.zeros(0), 2, 5, 0.95) == (2, 5)


def test_a_draft_that_never_hits_is_found_out_within_thirty_requests() -> None:
    rng = np.random.default_rng(5)
    champion = requests(rng, 100, 0.5)
    broken = [one | {"accepted": 0} for one in requests(rng, 30, 0.5)]
    first = next(seen for seen in range(1, 31) if compare_live(champion, broken[:seen], LIMITS).worse)
    assert 5 < first <= 30, "not from one request alone"
