"""Candidate steps by batch size, and the speed-up that live traffic shows."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.evaluation.cost_model import BatchCosts, CostModel, best_k, expected_tokens, speeds_of
from tide_platform.evaluation.speculation import (
    Speedup,
    alarm,
    candidate_steps,
    candidates,
    constant_rate,
    measured,
    scaled,
)

MODEL = CostModel(
    {
        1: BatchCosts(40.0, 0.08, {1: 1.02, 2: 1.05, 3: 1.1, 4: 1.15, 5: 1.2}),
        4: BatchCosts(50.0, 0.1, {1: 1.2, 2: 1.4, 3: 1.65, 4: 1.9, 5: 2.2}),
        8: BatchCosts(60.0, 0.1, {1: 1.45, 2: 1.9, 3: 2.4, 4: 2.9, 5: 3.4}),
    },
    "t",
)
KS = range(1, 6)


def lengths(*rates: float) -> list[float]:
    return [expected_tokens(rates, k) for k in range(1, len(rates) + 1)]


def test_fewer_steps_the_more_requests_and_none_where_nothing_is_gained() -> None:
    found = candidates(MODEL, lengths(0.6, 0.5, 0.45, 0.4, 0.4))
    assert {batch: entry["candidate_steps"] for batch, entry in found.items()} == {
        "1": [2, 3],
        "2": [1, 2],
        "5": [1],
        "7": [0, 1],
    }
    weak = candidates(MODEL, [1.3, 1.39, 1.417, 1.425, 1.428])
    assert [entry["candidate_steps"] for entry in weak.values()] == [[1], [0, 1], [0]]


def test_a_draft_that_is_worth_nothing_anywhere_is_still_tried() -> None:
    found = candidates(MODEL, lengths(0.05, 0.05, 0.05, 0.05, 0.05))
    assert list(found) == ["1"] and found["1"]["candidate_steps"] == [0, 1]
    # SGLang stops at one accepted draft in ten: a round of one step costs 1.1
    assert 0.5 + found["1"]["down_hysteresis"] == pytest.approx(0.1)


@st.composite
def machines(draw: st.DrawFn) -> BatchCosts:
    more = draw(st.lists(st.floats(0.01, 0.6), min_size=5, max_size=5))
    verify = {k: 1 + sum(more[:k]) for k in KS}
    return BatchCosts(10.0, draw(st.floats(0.0, 0.3)), verify)


rates = st.lists(st.floats(0.02, 0.95), min_size=5, max_size=5)


@given(machines(), rates)
@settings(max_examples=200, deadline=None)
def test_sglang_rests_at_the_fastest_step(costs: BatchCosts, drawn: list[float]) -> None:
    """By its rule, from wherever it starts; its own code says the same (tests/integration)."""
    by_k = lengths(*drawn)
    entry = candidates(CostModel({1: costs}, "t"), by_k)["1"]
    best = best_k(speeds_of(by_k, costs))
    steps = entry["candidate_steps"]
    assert best in steps == sorted(steps)
    up, down = entry["up_hysteresis"], entry["down_hysteresis"]
    i = steps.index(best)
    accepted = by_k[best - 1] - 1 if best else 0.0
    if best and i + 1 < len(steps):
        assert accepted <= best - 0.5 + up, "it stays below the next"
    if best and i:
        below = steps[i - 1]
        assert accepted > (below - 0.5 if below else 0.5) + down, "it does not fall"
        if below:
            assert by_k[below - 1] - 1 > below - 0.5 + up, "it comes back from below"
    for to, step in zip(steps[i:], steps[i + 1 :], strict=False):
        assert by_k[step - 1] - 1 <= (to - 0.5 if to else 0.5) + down, "it comes back from above"


def test_of_steps_that_one_threshold_cannot_tell_apart_the_highest_goes() -> None:
    """SGLang falls to 1 and to 0 at the same average."""
    costs = BatchCosts(10.0, 0.0, {1: 1.4, 2: 1.65})
    by_k = [1.46, 1.7]
    fastest = [best_k(speeds_of(scaled(by_k, f), costs)) for f in (0.8, 1, 1.2)]
    assert fastest == [0, 1, 2]
    assert candidate_steps(costs, by_k) == [0, 1]


@given(rates, st.floats(0.5, 1.2))
def test_scaled_acceptance_is_that_of_scaled_rates(drawn: list[float], factor: float) -> None:
    capped = [min(rate, 0.8) for rate in drawn]
    expected = lengths(*(rate * factor for rate in capped))
    assert scaled(lengths(*capped), factor) == pytest.approx(expected)
    assert scaled(lengths(*drawn), 1.0) == pytest.approx(lengths(*drawn))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.85, 1.0])
def test_a_constant_rate_from_one_length(rate: float) -> None:
    known = lengths(*[rate] * 5)
    assert constant_rate(known[2], 3, 5) == pytest.approx(known, abs=2e-3)


@dataclass
class Block:
    batch: int
    requests: int
    decode_s: float
    decoded: int


def test_live_speed_up_is_the_plain_step_over_a_live_token() -> None:
    blocks = [Block(1, 10, 2.5, 100), Block(1, 30, 5.0, 200), Block(2, 5, 4.333, 100), Block(16, 9, 1.0, 10)]
    found = measured(MODEL, blocks)
    assert list(found) == [1, 2], "16 lies outside of what was measured"
    assert found[1] == Speedup(pytest.approx(1.6), 40, pytest.approx(25.0), 40.0)  # type: ignore[arg-type]
    assert found[2].value == pytest.approx((40 + 10 / 3) / 43.33)
    assert measured(MODEL, [Block(1, 3, 0.0, 0)]) == {}


def speedups(**values: tuple[float, int]) -> dict[int, Speedup]:
    return {int(batch[1:]): Speedup(value, n, 1.0, value) for batch, (value, n) in values.items()}


def test_an_alarm_begins_under_one_and_ends_well_above_it() -> None:
    values: dict[str, float] = {}
    seen = []
    for value in (1.2, 1.01, 0.98, 0.97, 1.02, 0.99, 1.04, 1.06, 1.01):
        found = alarm(values, speedups(b4=(value, 50)), min_requests=20, hysteresis=0.05)
        values = found.values
        seen.append((found.slower, found.recovered))
    begun, ended = ([4], []), ([], [4])
    none = ([], [])
    assert seen == [none, none, begun, none, none, none, none, ended, none]
    assert values == {"4": 1.01}


def test_few_requests_change_nothing_and_batch_sizes_are_apart() -> None:
    before = {"1": 1.3, "4": 0.9}
    found = alarm(before, speedups(b1=(0.8, 19), b4=(1.3, 20), b8=(0.7, 40)), 20, 0.05)
    assert (found.slower, found.recovered) == ([8], [4])
    assert found.values == {"1": 1.3, "4": 1.3, "8": 0.7}
    assert before == {"1": 1.3, "4": 0.9}
    assert np.isclose(alarm({}, speedups(b1=(0.8, 20)), 20, 0.05).values["1"], 0.8)
