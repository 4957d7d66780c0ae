"""The adaptation experiment on the tiny target: runs are kept, more samples help, speeds are compared at the
best k of each draft.
"""

import json
from pathlib import Path

import pytest

from tide_platform.bench import adapt as bench
from tide_platform.bench import adapt_live
from tide_platform.bench.report import Report
from tide_platform.capture.record import Sample
from tide_platform.config import Settings


def test_each_size_is_done_once_and_more_samples_help(
    settings: Settings, by_tenant: dict[str, list[Sample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "collect", lambda *_: by_tenant)

    def run(most: int | None) -> Report:
        return bench.run(
            settings, tmp_path, workloads=("maths",), sizes=(4, 24), most=most, live=False, say=said.append
        )

    said: list[str] = []
    first = run(1)
    assert len(said) == 2, "the static draft and one size"
    assert set(first.ratios) == {f"maths_4_{of}k{k}" for of in ("", "general_") for k in range(1, 6)}
    report = run(None)
    assert len(said) == 3 and run(None).ratios == report.ratios and len(said) == 3
    assert report.ratios["maths_24_k2"] > report.ratios["maths_4_k2"] > 1
    low, high = report.intervals["maths_24_k2"]
    assert low <= report.ratios["maths_24_k2"] <= high
    assert (tmp_path / "drafts" / "maths-24" / "model.safetensors").exists()
    before, _, after = report.raw["runs"]
    assert report.ratios["maths_24_general_k3"] == pytest.approx(after["general"][2] / before["general"][2])


def test_speed_is_compared_at_the_best_k_of_each_draft(tmp_path: Path, settings: Settings) -> None:
    def passes(rate: float, length: float) -> list[dict[str, float]]:
        return [
            {"tokens_per_s": rate + i, "verify_rounds": 100, "accepted_drafts": 100 * (length - 1)}
            for i in range(4)
        ]

    live = {"plain": passes(100, 1)}
    for k, static, adapted in ((2, 110, 120), (3, 105, 150), (4, 90, 140)):
        live[f"static_k{k}"], live[f"adapted_k{k}"] = passes(static, 1.3), passes(adapted, 1.3 * 1.5)
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "maths.json").write_text(json.dumps(live))
    report = Report("adapt", {})
    adapt_live.measure(settings, tmp_path, "maths", tmp_path, report, print)
    assert report.ratios["maths_speed_over_static"] == pytest.approx(151.5 / 111.5, rel=1e-4)
    assert report.ratios["maths_speed_over_plain"] == pytest.approx(151.5 / 101.5, rel=1e-3)
    assert report.ratios["maths_live_k3"] == pytest.approx(1.5)
    assert "best k 3 adapted, 2 static" in report.notes[-1]
