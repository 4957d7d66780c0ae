"""What a verdict predicts: with coefficients of this target and precision, and without."""

from pathlib import Path

import pytest

from tide_platform.config import Settings, target_digest
from tide_platform.control.judge import _predict
from tide_platform.control.promotion import Comparison, Interval, Measured
from tide_platform.evaluation.cost_model import FILE, BatchCosts, CostModel, NoCostModel

TINY = Path(__file__).parents[2] / "fixtures" / "tiny_target"
CONDITIONS = {"dtype": "bfloat16", "device": "cpu", "date": "2026-11-30", "cores": 2}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state=tmp_path, target=TINY)


def on_window() -> Comparison:
    lengths = [1.5, 1.8, 1.9]
    return Comparison(
        20, Measured(1.8, lengths, [0.5]), Measured(2.1, [1.6, 2.1, 2.3], [0.6]), Interval(0.17, 0.1, 0.2)
    )


def kept(settings: Settings, digest: str, **conditions: object) -> None:
    by_batch = {8: BatchCosts(50.0, 0.1, {1: 1.2, 2: 1.4}), 1: BatchCosts(40.0, 0.1, {1: 1.0, 2: 1.0})}
    CostModel(by_batch, digest, CONDITIONS | conditions).write(settings.state / FILE)


def test_speed_of_both_drafts_by_batch_and_k(settings: Settings) -> None:
    kept(settings, target_digest(TINY))
    predicted, costs = _predict(settings, on_window())
    assert [each.batch for each in predicted] == [1, 8] and "2026-11-30 on 2 cores" in costs
    assert predicted[0].champion == {0: 1.0, 1: pytest.approx(1.5 / 1.1), 2: pytest.approx(1.8 / 1.2)}
    assert predicted[1].challenger == {0: 1.0, 1: pytest.approx(1.6 / 1.3), 2: pytest.approx(2.1 / 1.6)}


def test_without_coefficients_it_is_said_and_not_guessed(settings: Settings) -> None:
    assert _predict(settings, on_window()) == (
        [],
        "not known: no cost model was measured; `tide bench cost-model` does",
    )
    kept(settings, "another")
    predicted, why = _predict(settings, on_window())
    assert predicted == [] and "measured with another target" in why
    kept(settings, target_digest(TINY), dtype="float32")
    predicted, why = _predict(settings, on_window())
    assert predicted == [] and "on cpu in float32, served is cpu in bfloat16" in why


def test_a_broken_file_is_an_error(settings: Settings) -> None:
    (settings.state / FILE).write_text("{}")
    with pytest.raises(NoCostModel, match="measure again"):
        _predict(settings, on_window())
