"""The gate's decision and its evidence."""

import json
from dataclasses import replace

import pytest

from tide_platform.control.promotion import Comparison, Interval, Measured, Predicted, Verdict, decide
from tide_platform.evaluation.sequence import Evidence
from tide_platform.evaluation.slices import Slice


def compared(champion: float, challenger: float, lower: float) -> Comparison:
    gain = challenger / champion - 1
    return Comparison(
        20,
        Measured(champion, [champion], [0.5]),
        Measured(challenger, [challenger], [0.6]),
        Interval(gain, lower, gain + 0.05),
    )


def verdict(window: Comparison, reference: Comparison) -> Verdict:
    return decide(
        window="demo/w00001",
        champion="old",
        challenger="new",
        k=2,
        on_window=window,
        on_reference=reference,
        confidence=0.95,
        min_gain=0.02,
        reference_floor=0.97,
    )


@pytest.mark.parametrize(
    ("lower", "reference", "passed"),
    [(0.02, 0.97, True), (0.019, 1.0, False), (0.5, 0.96, False), (0.3, 1.2, True)],
)
def test_both_conditions_decide(lower: float, reference: float, passed: bool):
    found = verdict(compared(1.5, 2.0, lower), compared(2.0, 2.0 * reference, -0.1))
    assert found.passed is passed and len(found.reasons) == 2


def test_a_verdict_is_whole_after_json():
    found = verdict(compared(1.5, 1.8, 0.1), compared(2.0, 2.0, -0.1))
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.metrics()["acceptance_length.window"] == 1.8
    assert "| window | 20 | 1.500 | 1.800 | +20.0% |" in found.markdown()
    assert found.summary.startswith("passed: gain on the window's 20")


def again(lower: float, earlier: int) -> Verdict:
    """A clear gain at one look, whose bound at any time is ``lower``."""
    once = compared(1.5, 2.0, 0.2)
    found = replace(once, evidence=Evidence(20, 1.3, 1 + lower, 1.5, 0.95, 0.02, 30.0))
    return decide(
        window="demo/w00001",
        champion="old",
        challenger="new",
        k=2,
        on_window=found,
        on_reference=compared(2.0, 2.0, -0.1),
        confidence=0.95,
        min_gain=0.02,
        reference_floor=0.97,
        earlier=earlier,
    )


@pytest.mark.parametrize(
    ("lower", "earlier", "passed"), [(0.01, 0, True), (0.01, 1, False), (0.02, 1, True), (0.3, 4, True)]
)
def test_a_challenger_that_was_judged_before_needs_the_bound_of_any_time(
    lower: float, earlier: int, passed: bool
):
    found = again(lower, earlier)
    assert found.passed is passed
    assert (f"judged {earlier} times before" in found.summary) is bool(earlier)
    assert found.metrics()["e_value.window"] == 30


def test_without_such_a_bound_it_does_not_pass_again():
    once = compared(1.5, 2.0, 0.2)
    kept = verdict(once, compared(2.0, 2.0, -0.1))
    assert kept.passed
    found = replace(kept, earlier=1)
    assert found.earlier == 1
    assert not decide(
        window="w", champion="a", challenger="b", k=2, on_window=once, on_reference=once, confidence=0.95,
        min_gain=0.02, reference_floor=0.97, earlier=1,
    ).passed  # fmt: skip


def test_slices_predictions_and_limits_are_told_and_whole_after_json():
    some = Slice("tenant", "a", 12, 1.5, 1.8)
    window = replace(compared(1.5, 1.8, 0.1), slices=[some], left_out=3, slack=0.2)
    found = decide(
        window="w", champion="a", challenger="b", k=2, on_window=window, on_reference=compared(2.0, 2.0, 0.0),
        confidence=0.95, min_gain=0.02, reference_floor=0.97,
        predicted=[Predicted(1, {0: 1.0, 2: 1.1}, {0: 1.0, 2: 1.25})], costs="costs measured today",
    )  # fmt: skip
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
    text = found.markdown()
    assert "| tenant a | 12 | 1.500 | 1.800 | +20.0% |" in text
    assert "| batch | k = 2 |" in text and "| 1 | 1.10 → 1.25 |" in text and "costs measured today" in text
    assert "3 samples could not be replayed" in text and "known to 0.2 nats" in text
    assert found.metrics()["predicted_speed.batch1.k2"] == 1.25


def test_verdicts_from_before_slices_are_still_read():
    raw = verdict(compared(1.5, 1.8, 0.1), compared(2.0, 2.0, -0.1)).to_json()
    for name in ("earlier", "predicted", "costs"):
        del raw[name]
    for name in ("evidence", "slices", "left_out", "slack"):
        del raw["on_window"][name]
    read = Verdict.from_json(raw)
    assert read.earlier == 0 and read.on_window is not None and read.on_window.slices == []


def test_without_a_cost_model_the_report_says_so():
    found = replace(verdict(compared(1.5, 1.8, 0.1), compared(2.0, 2.0, 0.0)), costs="not known: none")
    assert "Predicted speed: not known: none" in found.markdown()
