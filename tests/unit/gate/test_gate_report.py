"""The gate's report, and the command where no server is needed to know that a draft fails."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.fixtures.tiny import TINY
from tests.unit.gate.gate_examples import draft_folder, rewrite, stale
from tide_platform.cli import gate
from tide_platform.config import Settings, dump_settings
from tide_platform.gate.report import Check, GateReport, Tolerance, failed, judged, passed
from tide_platform.gate.run import run_gate

LIMIT = Tolerance(0.5, "said in a test")


def report(*checks: Check) -> GateReport:
    return GateReport("d", "0" * 16, "t", "1" * 16, "transformers", 2, 1.0, checks)


@pytest.mark.parametrize(("value", "status"), [(0.5, "pass"), (0.51, "fail"), (float("nan"), "fail")])
def test_a_number_is_judged_by_its_tolerance(value: float, status: str) -> None:
    check = judged("logits", "draft", value, LIMIT, "good", "bad")
    assert check.status == status and check.message == ("good" if status == "pass" else "bad")
    assert (check.tolerance, check.reason) == (0.5, "said in a test")


def test_what_was_not_run_is_no_pass() -> None:
    assert report(passed("files", "draft", "well")).passed
    assert not report(passed("files", "draft", "well"), Check("live", "server", "not run", "no")).passed
    assert not report().passed


def test_a_report_is_json_whatever_was_measured() -> None:
    found = report(
        judged("layers", "capture", float("inf"), LIMIT, "", "far"), failed("map", "draft", "stale d2t")
    )
    raw = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert not raw["passed"] and raw["checks"][0]["value"] == "inf"
    assert [check.name for check in found.failures] == ["layers", "map"]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate({"target": TINY, "state": tmp_path / "state"})


def test_a_fault_of_the_folder_starts_no_server(settings: Settings, tmp_path: Path) -> None:
    draft, said = draft_folder(tmp_path / "draft"), []
    rewrite(draft, lambda tensors: tensors.update({"fusion.weight": tensors.pop("fc.weight")}))
    found = run_gate(settings, draft, say=said.append)
    assert [(c.name, c.status) for c in found.checks] == [("files", "fail"), ("all others", "not run")]
    assert said[0].startswith("FAIL files (draft): tensor fusion.weight is skipped silently by SGLang")
    assert not (tmp_path / "state").exists()


def test_the_command_ends_with_1_and_writes_the_report(settings: Settings, tmp_path: Path) -> None:
    draft, config, out = (
        draft_folder(tmp_path / "draft"),
        tmp_path / "tide.yaml",
        tmp_path / "out" / "gate.json",
    )
    config.write_text(dump_settings(settings))
    rewrite(draft, stale)
    app = typer.Typer()
    app.command()(gate.command)
    result = CliRunner().invoke(
        app, ["--config", str(config), "--draft", str(draft), "--json", "--out", str(out)]
    )
    assert result.exit_code == 1
    raw = json.loads(result.stdout)
    assert raw == json.loads(out.read_text()) and not raw["passed"]
    assert [c["name"] for c in raw["checks"] if c["status"] == "fail"] == ["map"]
