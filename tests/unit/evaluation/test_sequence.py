"""What the two statistics conclude, by simulation; the evidence's arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traffic import Experiments, experiments

from tide_platform.evaluation.acceptance import KReplay, RequestReplay
from tide_platform.evaluation.sequence import SHARES, evidence, log_capital
from tide_platform.evaluation.statistics import bounds, compare, ratios_of

K = 2
LOOKS = np.arange(10, 210, 10) - 1  # after 10, 20, ... 200 requests


def replays(tokens: np.ndarray, rounds: np.ndarray, order: np.ndarray | None = None) -> list[RequestReplay]:
    arrived = np.arange(len(tokens)) if order is None else order
    return [
        RequestReplay(
            f"r{i}", f"s{i}", int(n), {K: KReplay(int(r), int(n - r), (int(n - r), 0))}, int(n), float(at)
        )
        for i, (n, r, at) in enumerate(zip(tokens, rounds, arrived, strict=True))
    ]


def capital(of: Experiments, margin: float = 0.0) -> np.ndarray:
    """[T, N]"""
    a, b = of.rounds_a_TN / of.tokens_TN, of.rounds_b_TN / of.tokens_TN
    return log_capital(a, b, np.array([1 + margin]), K)[:, 0]


@pytest.fixture(scope="module")
def equal() -> Experiments:
    return experiments(seed=1, trials=3000, requests=200, gain=1.0)


def test_twenty_looks_at_equal_drafts_promote_one_in_a_hundred_at_most(equal: Experiments) -> None:
    promoted = (capital(equal)[:, LOOKS] >= np.log(100)).any(1)
    assert promoted.mean() <= 0.01


def promoted_by_bootstrap(
    of: Experiments, requests: int, confidence: float, margin: float = 0.0
) -> np.ndarray:
    """[T] of one look after ``requests``. Each 500 trials are resampled alike: that saves the time."""
    rng, lower = np.random.default_rng(2), []
    for trial in range(len(of.tokens_TN)):
        if trial % 500 == 0:
            weights = rng.multinomial(requests, np.full(requests, 1 / requests), 4000).astype(float)
        ratios = ratios_of(weights @ of.counts(trial)[:requests])
        lower.append(bounds(ratios, requests, confidence)[0])
    return np.array(lower) > 1 + margin


def test_bootstrap_promotes_one_equal_draft_in_a_hundred_at_one_look_and_more_at_twenty(
    equal: Experiments,
) -> None:
    """Why a verdict that is looked at again needs the sequence."""
    assert promoted_by_bootstrap(equal, 200, 0.99).mean() <= 0.01
    few = equal.first(200)
    assert np.any([promoted_by_bootstrap(few, int(n) + 1, 0.99) for n in LOOKS], axis=0).mean() >= 0.03


def test_the_gate_of_one_look_promotes_no_equal_draft(equal: Experiments) -> None:
    """At the gate's defaults: 95 % confidence of a gain of 2 %, on few requests."""
    assert promoted_by_bootstrap(equal, 50, 0.95, 0.02).mean() <= 0.01


def test_power() -> None:
    """A gain of 20 % in the acceptance rate, about 10 % in the acceptance length, is seen within 300 requests
    by either; one of 50 % within 100.
    """
    some, much = experiments(5, 100, 300, gain=1.2), experiments(6, 100, 100, gain=1.5)
    assert (capital(some, 0.02).max(1) >= np.log(20)).mean() > 0.9
    assert (capital(much, 0.02).max(1) >= np.log(20)).mean() > 0.95
    assert promoted_by_bootstrap(much, 100, 0.95, 0.02).mean() > 0.95


def test_the_interval_covers_at_all_times_and_holds_the_point() -> None:
    of, true = experiments(7, 20, 100, gain=1.2), experiments(8, 200, 500, gain=1.2)
    exact = (true.rounds_a_TN / true.tokens_TN).mean() / (true.rounds_b_TN / true.tokens_TN).mean()
    missed = 0
    for trial in range(20):
        tokens = of.tokens_TN[trial]
        a, b = replays(tokens, of.rounds_a_TN[trial]), replays(tokens, of.rounds_b_TN[trial])
        found = evidence(a, b, K, confidence=0.95)
        assert found.lower <= found.ratio <= found.upper
        missed += not found.lower <= exact <= found.upper
    assert missed <= 2  # a tenth at most: two bounds at 0.95


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_no_outcome_ruins_a_bettor(drawn: list[tuple[int, float, float]]) -> None:
    tokens = np.array([n for n, _, _ in drawn])
    share = [1 / (K + 1) + (1 - 1 / (K + 1)) * np.array([d[i] for d in drawn]) for i in (1, 2)]
    found = log_capital(share[0][None], share[1][None], np.array([0.5, 1.0, 2.0]), K)
    assert np.isfinite(found).all()
    assert found.min() >= len(tokens) * np.log(1 - SHARES.max()) - 1e-9


@given(st.floats(1.0, 1.5), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_capital_is_a_supermartingale_where_the_null_is_true(ratio: float, seed: int) -> None:
    """Exactly, on two outcomes whose mean is on the edge of the null."""
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(1 / (K + 1), 1, 2), rng.uniform(1 / (K + 1), 1, 2)
    z = a - ratio * b
    if z[0] * z[1] >= 0:
        return
    chance = -z[1] / (z[0] - z[1])  # E[z] = 0
    after = np.exp(log_capital(a[:, None], b[:, None], np.array([ratio]), K)[:, 0, 0])
    assert chance * after[0] + (1 - chance) * after[1] <= 1 + 1e-9


def test_requests_count_in_the_order_of_their_arrival_and_stretches_as_one() -> None:
    of = experiments(9, 1, 30, gain=1.5)
    tokens, a, b = of.tokens_TN[0], of.rounds_a_TN[0], of.rounds_b_TN[0]
    found = evidence(replays(tokens, a), replays(tokens, b), K, 0.95)
    order = np.random.default_rng(0).permutation(30)
    one, other = ([pair[i] for i in order] for pair in (replays(tokens, a), replays(tokens, b)))
    assert evidence(one, other, K, 0.95) == found, "by captured_at, however they are given"
    halves = [RequestReplay("r", f"s{i}", 5, {K: KReplay(3, 2, (2, 0))}, 5, float(i)) for i in range(4)]
    same = evidence(halves, halves, K, 0.95)
    assert same.requests == 1 and same.ratio == 1 and same.lower < 1 < same.upper and same.e_value <= 1


def test_a_comparison_carries_both() -> None:
    of = experiments(10, 1, 200, gain=1.5)
    a, b = (replays(of.tokens_TN[0], rounds) for rounds in (of.rounds_a_TN[0], of.rounds_b_TN[0]))
    found = compare(a, b, K, 0.95, margin=0.02)
    assert found.evidence is not None
    assert found.lower > found.evidence.lower > 1.02 and found.evidence.e_value > 20
    assert found.evidence.ratio == pytest.approx(found.ratio, rel=0.05)
    bare = [RequestReplay(r.request_id, r.sample_id, r.tokens, r.by_k) for r in a]
    assert compare(bare, bare, K).evidence is None
