"""The coefficients from milliseconds that a known machine would have shown."""

from pathlib import Path

import pytest

from tide_platform.bench import cost_model as bench
from tide_platform.bench import serve
from tide_platform.config import Settings
from tide_platform.evaluation.cost_model import FILE, CostModel


def milliseconds(k: int, batch: int) -> float:
    """A step costs 40 ms and 1 ms a row beyond the first, a draft step 4 ms."""
    return 40 + 1.0 * (batch * (k + 1) - 1) + 4.0 * k


def test_a_known_machine_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together: list[set[int]] = []

    def measure(settings: Settings, cases: list[tuple[int, int]], repetitions: int) -> serve.Measured:
        together.append({k for k, _ in cases})
        ms = {(k, batch): [milliseconds(k, batch) * f for f in (1, 1.1, 0.9)] for k, batch in cases}
        return serve.Measured(ms, {k: [1.5] for k, _ in cases}, "digest")

    monkeypatch.setattr(serve, "measure", measure)
    settings = Settings(state=tmp_path)
    report = bench.run(settings, batches=(1, 8), ks=(1, 2, 3))
    assert report.ratios["draft_batch_1"] == pytest.approx(4 / 40)
    assert report.ratios["draft_batch_8"] == pytest.approx(4 / 47)
    assert report.ratios["verify_k3_batch_8"] == pytest.approx(71 / 47)
    assert report.ratios["round_k2_batch_1"] == pytest.approx(50 / 40)
    low, high = report.intervals["round_k2_batch_1"]
    assert low <= 1.25 <= high
    assert together == [{0, 1}, {0, 2}, {0, 3}], "two servers at a time"
    kept = CostModel.read(tmp_path / FILE)
    assert kept is not None and kept.target_digest == "digest" and kept.conditions["dtype"] == "bfloat16"
    assert kept.at(8).step_ms == pytest.approx(47)
    assert kept.at(8).round(3) == pytest.approx((47 + 24 + 12) / 47)


def test_a_round_stays_what_was_measured_whatever_the_fit() -> None:
    noisy = bench.fit(40.0, {1: 1.2, 2: 1.4, 3: 1.5}, {1: 1.3, 2: 1.6, 3: 1.9})
    assert noisy.draft == 0 and noisy.verify == {1: 1.2, 2: 1.4, 3: 1.5}
    greedy = bench.fit(40.0, {1: 1.2, 2: 1.4}, {1: 0.5, 2: 0.5})
    assert min(greedy.verify.values()) >= 1 and greedy.round(2) == pytest.approx(1.4)
