"""Figures, plan, watching and the page of the demo, without a stack."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import Cut, Scan
from tide_platform.local.demo import finish, plan
from tide_platform.local.demo.clock import Clock, Pace, Phase
from tide_platform.local.demo.finish import CycleFailed, NotServed, Outcome, conclude
from tide_platform.local.demo.measure import Figures
from tide_platform.local.demo.report import Moment
from tide_platform.local.demo.summary import MlflowRun, Summary
from tide_platform.local.demo.watch import Watcher, WindowLate
from tide_platform.local.graphql import Run
from tide_platform.serving.client import Generation
from tide_platform.serving.report import TrafficReport, summarize


def _report(concurrency: int, tokens_per_s: float, histogram: list[int]) -> TrafficReport:
    rounds, accepted = sum(histogram), sum(i * n for i, n in enumerate(histogram))
    tokens = rounds + accepted + 1
    one = Generation("r", "", [], 10, tokens, rounds, accepted, histogram, 1.0, "stop")
    return summarize([one], [], tokens / tokens_per_s, concurrency)


def test_figures_are_medians_and_ratios_of_sums() -> None:
    figures = Figures("static", [_report(8, 50, [5, 5, 0]), _report(8, 70, [0, 5, 5]), _report(1, 9, [1])])
    assert figures.tokens_per_s(8) == pytest.approx(60)
    assert figures.acceptance_length(8) == pytest.approx(1 + 20 / 20)
    assert figures.acceptance_length(1) == 1.0
    assert figures.by_position() == pytest.approx([15 / 21, 5 / 15])


def test_all_samples_are_sent_and_levels_last_alike() -> None:
    assert plan.level_sizes(150) == {4: 21, 8: 42, 16: 87}
    for samples in range(1, 200):
        assert sum(plan.level_sizes(samples).values()) == samples


def test_the_plan_fits_into_the_limit() -> None:
    phases = plan.phases(plan.Options("maths", 200))
    assert sum(phase.expected_s for phase in phases) < plan.LIMIT_S
    assert plan.HEADLINE.prompts >= 32 and plan.GENERAL_LOAD.prompts >= 24


def test_the_clock_adds_up_and_looks_ahead() -> None:
    said: list[str] = []
    clock = Clock([Phase("a", "first", 1), Phase("b", "second", 2), Phase("c", "third", 4)], said.append)
    with clock.phase("a"):
        pass
    with clock.phase("a"):
        pass
    assert list(clock.seconds) == ["a"] and "first (about 1 s)" in said[0]
    assert clock.left_after("a") == 6
    assert clock.total()["total"] >= clock.seconds["a"]


def test_a_slow_machine_is_noticed() -> None:
    pace = Pace()
    assert pace.factor == 1.0
    pace.add(10, 5)
    assert pace.factor == 1.0
    pace.add(10, 35)
    assert pace.factor == 2.0


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No MLflow: making its database takes longer than all of these tests."""
    found = MlflowRun(run_id="m-1", model_version="2", alias="champion")
    monkeypatch.setattr(finish, "_mlflow", lambda settings, window: found)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings.model_validate({})
    settings.state = tmp_path
    settings.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    return settings


def _dagster(runs: list[Run]) -> Any:
    return SimpleNamespace(
        runs=lambda: runs,
        sensors=lambda: {
            "enough_hidden_states": {"status": "RUNNING", "ticks": [{"status": "SKIPPED", "error": None}]}
        },
        failures=lambda run_id: ["draft_checkpoint: out of memory"],
    )


def _cut(ledger: Ledger, samples: int = 16) -> Any:
    before = ledger.scan("demo")
    first = before.last_row + 1
    (key,) = ledger.cut(
        "demo",
        before,
        Scan(before.version + 1, first + samples, first + samples - 1, 0),
        [Cut(before.last_row, first + samples - 1, before.version + 1, samples, samples * 90)],
    )
    return key


def test_watching_sees_a_window_to_its_end(settings: Settings) -> None:
    ledger = Ledger(settings.ledger.url)
    said: list[str] = []
    watcher = Watcher(settings, _dagster([]))
    assert watcher.new_window(set(), 0.0, said.append) is None
    known = watcher.known()
    key = _cut(ledger)
    window = watcher.new_window(known, 5.0, said.append)
    assert window is not None and window.key == key and watcher.open_windows()
    with pytest.raises(WindowLate, match=r"window w00001 is owed.*running, last tick skipped"):
        watcher.until_final(window, -1.0, said.append)
    record = ledger.claim(key, "run-1", 1)
    ledger.trained(key, "run-1", challenger="c" * 16, parent="p" * 16, mlflow_run="m")
    ledger.judged(key, "run-1", champion="p" * 16, passed=False, evidence={"passed": False}, reason="no gain")
    record = watcher.until_final(window, 5.0, said.append)
    assert record.state == "rejected" and record.run_id == "run-1"
    assert watcher.verdict_of(record) == {"passed": False}
    assert watcher.why_failed(record) == ["no gain", "draft_checkpoint: out of memory"]
    watcher.close()
    ledger.close()


def test_measuring_waits_for_runs_in_progress(settings: Settings) -> None:
    runs = [Run("run-1", "STARTED", 0.5, 1.0, None)]
    watcher = Watcher(settings, _dagster(runs))
    with pytest.raises(WindowLate, match="still in progress"):
        watcher.until_quiet(-1.0, lambda text: None)
    runs[0] = Run("run-1", "SUCCESS", 0.5, 1.0, 2.0)
    watcher.until_quiet(1.0, lambda text: None)
    watcher.close()


def _outcome(settings: Settings, folder: Path, state: str, served: str) -> Outcome:
    window: Any = SimpleNamespace(
        key=SimpleNamespace(window="w00001"),
        state=_State(state),
        challenger="new",
        run_id="run-1",
        mlflow_run="m-1",
        samples=150,
        tokens=14000,
        lance_version=9,
    )
    figures = {
        "plain": Figures("plain", [_report(8, 80, [0])]),
        "static": Figures("static", [_report(8, 64, [8, 2, 1]), _report(4, 40, [8, 2, 1])]),
        "adapted": Figures("adapted", [_report(8, 80, [5, 4, 2])] if state == "deployed" else []),
    }
    general = {"before": 1.6, "after": 1.59} if state == "deployed" else {"before": 1.6}
    return Outcome(
        settings=settings,
        options=plan.Options("maths", 150),
        clock=Clock([], lambda line: None),
        window=window,
        run=Run("run-1", "SUCCESS", 0.5, 1.0, 2.0, {"dagster/sensor_name": "enough_hidden_states"}),
        verdict={
            "passed": state == "deployed",
            "champion": "old",
            "challenger": "new",
            "reasons": ["gain <= 2 %"],
        },
        why_failed=["draft_checkpoint: out of memory"],
        static_draft="old",
        served_draft=served,
        figures=figures,
        general=general,
        held_out=32,
        moments=[
            Moment(float(i), "static", phase, 10, 4)
            for phase in ("reference", "static", "general", "traffic")
            for i in range(20)
        ],
        dropped=0,
        addresses={"Dagster": "http://127.0.0.1:3070"},
        folder=folder,
    )


class _State(str):
    @property
    def value(self) -> str:
        return str(self)


def test_the_summary_of_a_deployed_draft(settings: Settings, tmp_path: Path) -> None:
    conclude(_outcome(settings, tmp_path, "deployed", served="new"))
    raw = json.loads((tmp_path / "summary.json").read_text())
    assert raw["workload"] == "maths" and raw["held_out_prompts"] == 32 and raw["k"] == 2
    assert raw["plain"] == {"tokens_per_s": pytest.approx(80, abs=0.1)}
    assert set(raw["static"]) == set(raw["adapted"]) == {"acceptance_length", "tokens_per_s", "draft"}
    assert raw["ratio"]["tokens_per_s"] == pytest.approx(80 / 64, abs=0.01)
    assert raw["general"] == {"before": 1.6, "after": 1.59}
    assert raw["window"] == {"samples": 150, "tokens": 14000, "lance_version": 9}
    assert raw["dagster"] == {"run_id": "run-1", "launched_by": "enough_hidden_states"}
    assert raw["mlflow"] == {"run_id": "m-1", "model_version": "2", "alias": "champion"}
    assert raw["samples_dropped"] == 0 and raw["seconds"]["total"] >= 0 and raw["served_draft"] == "new"
    Summary.model_validate(raw)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 3 and "gain &lt;= 2 %" in page and "http://127.0.0.1:3070" in page


def test_a_rejected_challenger_is_a_valid_end(settings: Settings, tmp_path: Path) -> None:
    summary = conclude(_outcome(settings, tmp_path, "rejected", served="old"))
    assert summary.outcome == "rejected" and summary.adapted is None and summary.ratio is None
    assert summary.verdict is not None and not summary.verdict.passed
    assert (tmp_path / "index.html").read_text().count("<svg") == 3


def test_a_failed_cycle_is_said_with_its_reason(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(CycleFailed, match="out of memory"):
        conclude(_outcome(settings, tmp_path, "failed", served="old"))
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"


def test_the_promoted_draft_must_be_the_served_one(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(NotServed, match="new was promoted, but the server serves old"):
        conclude(_outcome(settings, tmp_path, "deployed", served="old"))
    assert not (tmp_path / "summary.json").exists()
