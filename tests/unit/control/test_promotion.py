"""The gate's decision and its evidence."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tide_platform.control.promotion import Comparison, Interval, Measured, Predicted, Verdict, decide
from tide_platform.evaluation.sequence import Evidence
from tide_platform.evaluation.slices import Slice
from tide_platform.evaluation.throughput import AtBatch, Throughput


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
        slice_floor=0.95,
        slice_requests=20,
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
        slice_floor=0.95,
        slice_requests=20,
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
        min_gain=0.02, reference_floor=0.97, slice_floor=0.95, slice_requests=20, earlier=1,
    ).passed  # fmt: skip


def test_slices_predictions_and_limits_are_told_and_whole_after_json():
    some = Slice("tenant", "a", 12, 1.5, 1.8)
    window = replace(compared(1.5, 1.8, 0.1), slices=[some], left_out=3, slack=0.2)
    found = decide(
        window="w", champion="a", challenger="b", k=2, on_window=window, on_reference=compared(2.0, 2.0, 0.0),
        confidence=0.95, min_gain=0.02, reference_floor=0.97, slice_floor=0.95, slice_requests=20,
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
    for name in ("earlier", "predicted", "costs", "throughput", "slice_floor", "below_floor"):
        del raw[name]
    for name in ("evidence", "slices", "left_out", "slack"):
        del raw["on_window"][name]
    read = Verdict.from_json(raw)
    assert read.earlier == 0 and read.on_window is not None and read.on_window.slices == []
    assert read.throughput is None and read.below_floor == [] and "floor" not in read.markdown()


def test_without_a_cost_model_the_report_says_so():
    found = replace(verdict(compared(1.5, 1.8, 0.1), compared(2.0, 2.0, 0.0)), costs="not known: none")
    assert "Predicted speed: not known: none" in found.markdown()


def on_throughput(lower: float, challenger: float = 1.3, measured: bool = True, **other: Any) -> Verdict:
    """Acceptance is far better; what counts is the prediction."""
    by_batch = [AtBatch(1, 0.9, 1.2, 1.4, 2, 3, True), AtBatch(32, 0.1, 1.0, 1.0, 0, 0, measured)]
    found = Throughput(1.2, challenger, 1.08, 1 + lower, 1.1, 0.95, True, 5000, by_batch)
    given: dict[str, Any] = {
        "on_window": compared(1.5, 2.0, 0.2), "on_reference": compared(2.0, 2.0, 0.0), "throughput": found
    }  # fmt: skip
    return decide(
        window="w", champion="a", challenger="b", k=2, confidence=0.95, min_gain=0.02, reference_floor=0.97,
        slice_floor=0.95, slice_requests=20, **(given | other),
    )  # fmt: skip


@pytest.mark.parametrize(("lower", "passed"), [(0.02, True), (0.019, False), (-0.1, False)])
def test_predicted_throughput_decides_where_it_is_known(lower: float, passed: bool):
    found = on_throughput(lower)
    assert found.passed is passed
    assert "predicted gain in tokens a second on the window's 20 requests +8.0%" in found.summary
    assert found.metrics()["predicted_gain"] == pytest.approx(0.08)
    assert found.metrics()["predicted_gain_lower"] == pytest.approx(lower)
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
    page = found.markdown()
    assert "| 1 | 90% | 1.20 | 2 | 1.40 | 3 |" in page and "| all | 100% | 1.20 | | 1.30 | |" in page


def test_throughput_does_not_make_up_for_the_other_conditions():
    assert not on_throughput(0.05, on_reference=compared(2.0, 1.9, 0.0)).passed
    evidence = Evidence(20, 1.3, 1.01, 1.5, 0.95, 0.02, 30.0)
    again = replace(compared(1.5, 2.0, 0.2), evidence=evidence)
    assert on_throughput(0.05, on_window=again).passed
    assert not on_throughput(0.05, on_window=again, earlier=1).passed


def test_slower_than_no_speculation_and_unmeasured_batch_sizes_are_told_not_punished():
    found = on_throughput(0.05, challenger=0.93, measured=False)
    assert found.passed
    assert "slower than no speculation: 0.93 times" in found.summary
    assert "10% of the time at batch sizes outside" in found.summary
    assert "| 32 (not measured) |" in found.markdown()
    plain = on_throughput(0.05)
    assert "slower" not in plain.summary and "outside" not in plain.summary


def test_without_a_prediction_acceptance_decides_and_the_verdict_says_why():
    found = on_throughput(0.05, throughput=None, no_throughput="not known: no cost model")
    assert found.passed and "predicted_gain" not in found.metrics()
    assert "judged by acceptance at k = 2: tokens a second are not known: no cost model" in found.summary


@pytest.mark.parametrize("requests", [19, 40])
def test_a_slice_below_its_floor_rejects(requests: int):
    lost = Slice("tenant", "ann", requests, 2.0, 1.7, 0.01)
    fine = Slice("tenant", "bob", 40, 1.5, 2.1, 0.01)
    found = on_throughput(0.05, on_window=replace(compared(1.5, 2.0, 0.2), slices=[lost, fine]))
    assert found.passed is (requests < 20)
    if found.passed:
        assert found.below_floor == [] and "below the floor" not in found.markdown()
        return
    assert found.below_floor == [lost]
    assert "0.850 of the champion on the 40 requests of tenant ann is below 0.950" in found.summary
    assert "| tenant ann | 40 | 2.000 | 1.700 | -15.0% **below the floor of 0.95** |" in found.markdown()
    assert Verdict.from_json(json.loads(json.dumps(found.to_json()))) == found
