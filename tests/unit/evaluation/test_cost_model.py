"""What acceptance is worth: known numbers, and the best number of steps."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.evaluation.cost_model import (
    BatchCosts,
    CostModel,
    NoCostModel,
    NotMeasured,
    best_k,
    best_k_by_margin,
    expected_tokens,
    speed,
    speeds,
    speeds_of,
)

COSTS = BatchCosts(40.0, 0.1, {1: 1.1, 2: 1.2, 3: 1.35})


@pytest.mark.parametrize(
    ("rate", "k", "tokens"),
    [(0.5, 3, 1.875), (0.6, 3, 2.176), (0.8, 3, 2.952), (0.8, 5, 3.68928), (0.9, 3, 3.439)],
)
def test_tokens_a_round_at_one_rate(rate: float, k: int, tokens: float) -> None:
    """(1 - a^(k+1)) / (1 - a)."""
    assert expected_tokens([rate] * k, k) == pytest.approx(tokens)
    assert expected_tokens([rate] * k, k) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))


def test_speed_by_hand() -> None:
    rates = [0.8, 0.5, 0.5]
    assert expected_tokens(rates, 2) == pytest.approx(2.2)
    assert speed(rates, 2, COSTS) == pytest.approx(2.2 / 1.4)
    found = speeds(rates, COSTS)
    assert found == {
        0: 1.0,
        1: pytest.approx(1.8 / 1.2),
        2: pytest.approx(2.2 / 1.4),
        3: pytest.approx(2.4 / 1.65),
    }
    assert best_k(found) == 2 == best_k_by_margin(rates, COSTS)
    assert list(speeds(rates[:1], COSTS)) == [0, 1]
    assert speeds_of([1.8, 2.2, 2.4, 2.5], COSTS) == pytest.approx(found)


def test_a_draft_that_never_hits_is_not_worth_running() -> None:
    assert best_k(speeds([0.0, 0.0], COSTS)) == 0 == best_k_by_margin([0.0, 0.0], COSTS)


@st.composite
def machines(draw: st.DrawFn) -> BatchCosts:
    """The verify pass costs ever more a token, as on any machine that fills up."""
    steps = sorted(draw(st.lists(st.floats(0.0, 0.6), min_size=5, max_size=5)))
    verify, at = {}, 1.0
    for k, more in enumerate(steps, start=1):
        at += more
        verify[k] = at
    return BatchCosts(10.0, draw(st.floats(0.0, 0.5)), verify)


@given(machines(), st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5))
def test_the_marginal_rule_finds_the_fastest(costs: BatchCosts, rates: list[float]) -> None:
    by_speed = speeds(rates, costs)
    assert by_speed[best_k_by_margin(rates, costs)] == pytest.approx(max(by_speed.values()))


def test_what_was_not_measured_is_an_error() -> None:
    model = CostModel({1: COSTS}, "t")
    with pytest.raises(NotMeasured, match="no batch size 8, only 1"):
        model.at(8)
    with pytest.raises(NotMeasured, match="no k = 4, only 1, 2, 3"):
        model.at(1).round(4)
    with pytest.raises(ValueError, match="1 acceptance rates, 2 needed"):
        expected_tokens([0.5], 2)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "state" / "cost_model.json"
    assert CostModel.read(path) is None
    model = CostModel({1: COSTS, 8: COSTS}, "digest", {"cpu": "x"})
    model.write(path)
    assert CostModel.read(path) == model
    for broken in ("{", "[]", '{"by_batch": {"one": {}}}'):
        path.write_text(broken)
        with pytest.raises(NoCostModel, match="tide bench cost-model"):
            CostModel.read(path)
