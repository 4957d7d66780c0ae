"""The table of speculation, and what it is made of."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from control_fakes import serve
from typer.testing import CliRunner

from tide_platform.cli import speculation as cli
from tide_platform.config import Settings, dump_settings, target_digest
from tide_platform.control.cycle import Turn, batch_sizes
from tide_platform.control.ledger import Ledger
from tide_platform.control.promotion import Comparison, Interval, Measured, Verdict
from tide_platform.control.records import Cut, Scan
from tide_platform.control.speculation import (
    NothingToShow,
    acceptance_of,
    known_acceptance,
    look,
    served_draft,
)
from tide_platform.control.states import WindowKey
from tide_platform.evaluation.cost_model import FILE, BatchCosts, CostModel
from tide_platform.serving import adaptive

TINY = Path(__file__).parents[2] / "fixtures" / "tiny_target"
CHAMPION, CHALLENGER = [1.5, 1.7, 1.8, 1.85, 1.87], [1.7, 2.1, 2.3, 2.4, 2.45]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    found = Settings(state=tmp_path, target=TINY)
    found.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    return found


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    opened = Ledger(settings.ledger.url)
    yield opened
    opened.close()


def costs(settings: Settings) -> CostModel:
    by_batch = {
        1: BatchCosts(40.0, 0.1, {1: 1.0, 2: 1.1, 3: 1.2}),
        8: BatchCosts(60.0, 0.1, {1: 1.8, 2: 2.6, 3: 3.4}),
    }
    conditions = {"dtype": "bfloat16", "device": "cpu", "date": "2026-11-30", "cores": 2}
    model = CostModel(by_batch, target_digest(TINY), conditions)
    model.write(settings.state / FILE)
    return model


def judged(ledger: Ledger) -> None:
    """A verdict on `new` against `old`."""
    [key] = ledger.cut("demo", Scan(), Scan(1, 9, 9), [Cut(0, 9, 1, 9, 90)])
    ledger.claim(key, "run")
    ledger.trained(key, "run", challenger="new", parent="old", mlflow_run="m")
    of = Comparison(20, Measured(1.7, CHAMPION, []), Measured(2.1, CHALLENGER, []), Interval(0.2, 0.1, 0.3))
    verdict = Verdict("demo/w00001", "old", "new", 2, 0.95, 0.02, 0.95, True, [], of)
    ledger.judged(key, "run", champion="old", passed=True, evidence=verdict.to_json(), reason="better")


def served(ledger: Ledger, draft: str, token_ms: float = 25.0, requests: int = 10) -> None:
    """Requests alone, of 41 tokens in 20 rounds."""
    one = {
        "tenant": "ann", "draft": draft, "straddles": False, "prompt_tokens": 5, "tokens": 41, "rounds": 20,
        "accepted": 20, "token_ms": token_ms, "concurrency": 1.0, "reason": "length", "at": time.time(),
    }  # fmt: skip
    cursor = ledger.history.cursor("demo", "http://a")
    told = {
        "draft": draft,
        "started_at": 5.0,
        "missed": 0,
        "requests": [one | {"number": cursor.number + i} for i in range(1, requests + 1)],
        "rounds_by_batch": {"1": 150, "8": 50},
    }
    ledger.history.record("demo", "http://a", told)


def test_acceptance_is_the_last_verdicts_on_either_draft(settings: Settings, ledger: Ledger) -> None:
    judged(ledger)
    served(ledger, "new")
    assert acceptance_of(settings, ledger, "new").by_k == CHALLENGER
    assert acceptance_of(settings, ledger, "old").by_k == CHAMPION
    assert "by the verdict on demo/w00001" in acceptance_of(settings, ledger, "old").source


def test_without_a_verdict_it_is_that_of_live_requests(settings: Settings, ledger: Ledger) -> None:
    assert acceptance_of(settings, ledger, "old").by_k == []
    served(ledger, "old")
    found = acceptance_of(settings, ledger, "old")
    assert len(found.by_k) == 5 and found.by_k[1] == pytest.approx(2.0, abs=1e-3)
    assert "10 live requests, 2.000 at k = 2, as if" in found.source
    settings.serving.adaptive = True
    assert "whatever SGLang adapted it to" in acceptance_of(settings, ledger, "old").source
    assert "no request in 24 h" in acceptance_of(settings, ledger, "other").source


def test_a_server_starts_though_the_ledger_does_not_answer(settings: Settings) -> None:
    settings.ledger.url = "postgresql+psycopg2://nobody@127.0.0.1:1/none"
    found = known_acceptance(settings, "new")
    assert found.by_k == [] and "ledger cannot be read" in found.source


def test_the_served_draft_by_history_then_traffic_then_verdict(settings: Settings, ledger: Ledger) -> None:
    assert served_draft(settings, ledger) is None
    judged(ledger)
    assert served_draft(settings, ledger) == "old"
    served(ledger, "other")
    assert served_draft(settings, ledger) == "other"
    serve(ledger, WindowKey("demo", "w00001"), "run")
    assert served_draft(settings, ledger) == "new"


def test_the_table(settings: Settings, ledger: Ledger) -> None:
    with pytest.raises(NothingToShow, match="no cost model was measured"):
        look(settings, ledger, "new", 60)
    costs(settings)
    judged(ledger)
    served(ledger, "new")
    served(ledger, "old", token_ms=500)
    found = look(settings, ledger, "new", 60)
    assert [row.batch for row in found.rows] == [1, 8]
    alone, crowded = found.rows
    assert alone.rounds == pytest.approx({0: 1.0, 1: 1.1, 2: 1.3, 3: 1.5})
    assert alone.speeds[2] == pytest.approx(2.1 / 1.3) and crowded.speeds[3] == pytest.approx(2.3 / 3.7)
    assert alone.live is not None and alone.live.value == pytest.approx(40 / 25)
    assert alone.live.requests == 10 and crowded.live is None
    assert alone.steps and min(crowded.steps) == 0
    assert not found.stale, "it is not adaptive"
    assert look(settings, ledger, None, 60).rows[0].speeds == {}


def test_other_steps_than_the_server_was_given_are_told(settings: Settings, ledger: Ledger) -> None:
    costs(settings)
    judged(ledger)
    settings.serving.adaptive = True
    assert look(settings, ledger, "new", 60).stale
    known = acceptance_of(settings, ledger, "new")
    adaptive.plan_adaptive(settings, target_digest(TINY), "new", lambda _: known)
    assert not look(settings, ledger, "new", 60).stale
    weak = acceptance_of(settings, ledger, "old")
    adaptive.plan_adaptive(settings, target_digest(TINY), "old", lambda _: weak)
    assert look(settings, ledger, "new", 60).stale


def test_the_command_shows_it(settings: Settings, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    costs(settings)
    judged(ledger)
    served(ledger, "new")
    path = settings.state / "tide.yaml"
    path.write_text(dump_settings(settings))
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(cli.command)
    shown = CliRunner().invoke(app, ["--config", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "by the verdict on demo/w00001" in shown.output and "1.60" in shown.output
    assert "serving.adaptive is off" in shown.output
    raw = json.loads(CliRunner().invoke(app, ["--config", str(path), "--json"]).output)
    assert raw["rows"][0]["live"]["requests"] == 10 and raw["acceptance"]["by_k"] == CHALLENGER


def test_a_verdict_is_for_the_batch_sizes_of_the_newest_hours(settings: Settings, ledger: Ledger) -> None:
    turn = Turn(settings, ledger, WindowKey("demo", "w00001"), "run")
    assert batch_sizes(turn) == {}
    served(ledger, "new")
    assert batch_sizes(turn) == {1: 150, 8: 50}
    settings.gate.histogram_hours = 1e-9
    time.sleep(0.01)
    assert batch_sizes(turn) == {}
