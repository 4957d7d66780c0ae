"""The adaptation experiment on the tiny target: runs are kept, more samples help, speeds are compared at the
best k of each draft.
"""

import json
from pathlib import Path
from typing import Any, cast

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


def test_another_recipe_is_not_mixed_in(
    settings: Settings, by_tenant: dict[str, list[Sample]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "collect", lambda *_: by_tenant)

    def run(epochs: int, sizes: tuple[int, ...]) -> Report:
        settings.training.epochs = epochs
        return bench.run(
            settings, tmp_path, workloads=("maths",), sizes=sizes, live=False, say=lambda _: None
        )

    run(1, (4,))
    with pytest.raises(bench.OtherRecipe, match=r"maths-4\.json.*training.epochs 2, it was 1"):
        run(2, (4,))
    assert "maths_6_k2" in run(2, (6,)).ratios, "another number of samples is another run"


def test_more_samples_than_there_are_prompts_are_refused_before_anything_is_captured(
    settings: Settings, tmp_path: Path
) -> None:
    with pytest.raises(bench.TooFewPrompts, match=r"maths has .* prompts in traffic, not 99999"):
        bench.run(settings, tmp_path, workloads=("maths",), sizes=(99_999,), say=print)


def test_speed_is_compared_at_the_best_k_of_each_draft(tmp_path: Path, settings: Settings) -> None:
    def passes(rate: float, length: float) -> list[dict[str, float]]:
        return [
            {"tokens_per_s": rate + i, "verify_rounds": 100, "accepted_drafts": 100 * (length - 1)}
            for i in range(4)
        ]

    found = {
        "plain": passes(100, 1),
        "static_k2": passes(110, 1.25),
        "static_k3": passes(105, 1.3),
        "adapted_k3": passes(150, 1.3 * 1.5),
    }
    (tmp_path / "live").mkdir()
    for level in adapt_live.PASSES:
        live = {"best_k": {"static": 2, "adapted": 3}, "probe": {}, "passes": found}
        (tmp_path / "live" / f"maths-{level}.json").write_text(json.dumps(live))
    report = Report("adapt", {})
    adapt_live.measure(settings, tmp_path, "maths", tmp_path, report, print)
    assert report.ratios["maths_at_4_over_static"] == pytest.approx(151.5 / 111.5, rel=1e-4)
    assert report.ratios["maths_at_4_over_static_same_k"] == pytest.approx(151.5 / 106.5, rel=1e-4)
    assert report.ratios["maths_at_4_over_plain"] == pytest.approx(151.5 / 101.5, rel=1e-3)
    assert report.ratios["maths_at_1_acceptance"] == pytest.approx(1.5)
    assert "best k 3 adapted, 2 static; acceptance length at k 3 1.300 -> 1.950" in report.notes[-1]


def test_the_best_k_comes_from_a_probe_and_is_judged_by_other_passes() -> None:
    asked: list[tuple[str, int, int]] = []

    def ask(who: str, k: int, number: int, level: int) -> dict[str, float]:
        asked.append((who, k, number))
        best = {"static": 1, "adapted": 3, "plain": 0}[who]
        return {"tokens_per_s": 100.0 - abs(k - best)}

    found = adapt_live._passes(cast(Any, ask), 4, lambda _: None)
    assert found["best_k"] == {"static": 1, "adapted": 3}
    judged = asked[2 * len(adapt_live.KS) :]
    turn = [("plain", 0), ("static", 1), ("static", 3), ("adapted", 3)]
    assert [one[:2] for one in judged[:8]] == [*turn, *reversed(turn)]
    assert {name: len(of) for name, of in found["passes"].items()} == dict.fromkeys(
        ("plain", "static_k1", "static_k3", "adapted_k3"), adapt_live.REPEATS
    )
