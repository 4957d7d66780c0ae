"""The gate's decision and its evidence."""

import json

import pytest

from tide_platform.control.promotion import Comparison, Interval, Measured, Verdict, decide


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
