"""The statistics of the benchmarks, and the JSON that ``tide bench`` prints."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tide_platform.bench.report import Report, alternation, paired_interval, paired_ratio
from tide_platform.cli.bench import app


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        drift = rng.normal(1.0, 0.2, 30)  # of the machine: common to both of a pair
        case = 0.9 * drift * rng.normal(1, 0.02, 30)
        yardstick = drift * rng.normal(1, 0.02, 30)
        low, high = paired_interval(case, yardstick)
        hits += low <= 0.9 <= high
    assert hits >= 88


def test_pairs_are_kept_together() -> None:
    rng = np.random.default_rng(2)
    drift = rng.uniform(1.0, 10.0, 40)
    low, high = paired_interval(0.9 * drift, drift)
    assert low == pytest.approx(0.9) and high == pytest.approx(0.9)
    shuffled = rng.permutation(drift)
    low, high = paired_interval(0.9 * drift, shuffled)
    assert high - low > 0.2


def test_a_disturbed_pair_moves_nothing() -> None:
    rates = np.linspace(1.0, 10.0, 21)
    halved = 0.97 * rates
    halved[3] /= 2
    assert paired_ratio(halved, rates) == pytest.approx(0.97)


def test_a_single_pair_has_no_interval() -> None:
    assert paired_ratio([2.0], [4.0]) == 0.5
    with pytest.raises(ValueError):
        paired_interval([2.0], [4.0])


def test_blocks_alternate_abba() -> None:
    assert alternation(4) == [True, False, False, True, True, False, False, True]


def test_the_json_is_the_last_line_and_holds_the_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: object, *, batches: tuple[int, ...], ks: tuple[int, ...]) -> Report:
        report = Report("serve", {"k2_batch_1": np.float64(1.25)}, raw={"folder": Path("x")})
        report.intervals["k2_batch_1"] = (1.2, 1.3)
        report.notes.append(f"batches {batches}, k {ks}")
        return report

    fake = types.ModuleType("tide_platform.bench.serve")
    fake.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "tide_platform.bench.serve", fake)
    import tide_platform.bench

    monkeypatch.setattr(tide_platform.bench, "serve", fake, raising=False)
    done = CliRunner().invoke(app, ["serve", "--json", "--quick"])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["bench"] == "serve" and found["ratios"] == {"k2_batch_1": 1.25}
    assert found["intervals"] == {"k2_batch_1": [1.2, 1.3]} and found["raw"] == {"folder": "x"}
    assert set(found["conditions"]["load_average"]) == {"start", "end"}
    assert found["conditions"]["versions"]["torch"]
    assert "1.250" in done.stderr and "batches (1, 8)" in done.stderr

    shown = CliRunner().invoke(app, ["serve"])
    assert "1.200 … 1.300" in shown.stdout and not shown.stdout.startswith("{")
