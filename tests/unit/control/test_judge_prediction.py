"""What a verdict predicts: with coefficients of this target and precision, and without."""

from pathlib import Path

import pytest

from tide_platform.config import Settings, target_digest
from tide_platform.control.costs import usable_costs
from tide_platform.control.judge import Replayed, _predict, _throughput
from tide_platform.control.promotion import Comparison, Interval, Measured, Predicted
from tide_platform.evaluation.acceptance import KReplay, RequestReplay
from tide_platform.evaluation.cost_model import FILE, BatchCosts, CostModel, NoCostModel
from tide_platform.evaluation.throughput import Throughput

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
    predicted, costs = predicted_on(settings)
    assert [each.batch for each in predicted] == [1, 8] and "2026-11-30 on 2 cores" in costs
    assert predicted[0].champion == {0: 1.0, 1: pytest.approx(1.5 / 1.1), 2: pytest.approx(1.8 / 1.2)}
    assert predicted[1].challenger == {0: 1.0, 1: pytest.approx(1.6 / 1.3), 2: pytest.approx(2.1 / 1.6)}


def predicted_on(settings: Settings) -> tuple[list[Predicted], str]:
    """With the costs that the deployment has."""
    model, costs = usable_costs(settings)
    return _predict(model, on_window()), costs


def throughput(settings: Settings, steps: dict[int, int]) -> tuple[Throughput | None, str]:
    return _throughput(settings, replayed(), steps, *usable_costs(settings))


def test_without_coefficients_it_is_said_and_not_guessed(settings: Settings) -> None:
    assert predicted_on(settings) == (
        [],
        "not known: no cost model was measured; `tide bench cost-model` does",
    )
    kept(settings, "another")
    predicted, why = predicted_on(settings)
    assert predicted == [] and "measured with another target" in why
    kept(settings, target_digest(TINY), dtype="float32")
    predicted, why = predicted_on(settings)
    assert predicted == [] and "on cpu in float32, served is cpu in bfloat16" in why


def test_a_broken_file_is_an_error(settings: Settings) -> None:
    (settings.state / FILE).write_text("{}")
    with pytest.raises(NoCostModel, match="measure again"):
        predicted_on(settings)


def replayed() -> Replayed:
    """Twenty requests; the challenger is right twice as often."""

    def of(hits: int) -> list[RequestReplay]:
        by_k = {k: KReplay(20, hits + i, (hits, *[i] * (k - 1))) for i, k in enumerate((1, 2, 3))}
        return [RequestReplay(f"r{n}", f"s{n}", 30, by_k) for n in range(20)]

    return Replayed(of(5), of(12), 0)


def test_tokens_a_second_at_the_batch_sizes_served(settings: Settings) -> None:
    kept(settings, target_digest(TINY))
    found, why = throughput(settings, {1: 100, 8: 100})
    assert found is not None and why == "" and found.confidence == settings.gate.confidence
    assert found.ratio == pytest.approx((1 + 13 / 20) / (1 + 6 / 20)) and not found.adaptive
    settings.serving.adaptive = True
    adaptive, _ = throughput(settings, {1: 100, 8: 100})
    assert adaptive is not None and adaptive.adaptive
    assert [(each.champion_k, each.challenger_k) for each in adaptive.by_batch] == [(1, 1), (0, 1)]


def test_where_tokens_a_second_cannot_be_known_it_says_why(settings: Settings) -> None:
    assert "no cost model" in throughput(settings, {1: 100})[1]
    kept(settings, target_digest(TINY))
    assert throughput(settings, {}) == (
        None,
        "not known: no decode step was seen in 24 h (gate.histogram_hours)",
    )
    settings.serving.k = 3
    found, why = throughput(settings, {1: 100})
    assert found is None and "no k = 3, only 1, 2" in why
