"""``tide gate`` as a user runs it, with a server of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from gate_settings import settings_in

from tests.unit.gate.gate_examples import rewrite
from tide_platform.config import dump_settings

TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
CHECKS = {
    ("files", "draft"), ("target", "draft"), ("rope", "draft"), ("layers", "draft"), ("map", "draft"),
    ("head", "draft"), ("capture", "capture"), ("layers", "capture"), ("norm", "capture"),
    ("teacher", "capture"), ("mask", "capture"), ("logits", "draft"), ("live", "server"),
    ("files", "export"), ("map", "export"), ("head", "export"), ("logits", "export"), ("overfit", "server"),
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tide.yaml"
    path.write_text(dump_settings(settings_in(tmp_path / "state")))
    return path


def gate(config: Path, draft: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    command = [*TIDE, "gate", "--config", str(config), "--draft", str(draft), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def left_behind(config: Path) -> list[list[str]]:
    """Command lines of processes that know the gate's folder."""
    mark = str(config.parent / "state")
    lines = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(mark in word for word in line)]


@pytest.mark.parametrize("reference", ["transformers", "engine"])
def test_a_good_draft_passes_and_nothing_is_left(config: Path, draft: Path, reference: str) -> None:
    out = config.parent / "reports" / "gate.json"
    status, report, said = gate(config, draft, "--reference", reference, "--out", str(out))
    assert status == 0, said
    assert report["passed"] and report["reference"] == reference and report["k"] == 2
    assert {(c["name"], c["on"]) for c in report["checks"]} == CHECKS
    for check in report["checks"]:
        assert check["status"] == "pass"
        if check["tolerance"] is not None:
            assert check["value"] <= check["tolerance"] and check["reason"]
    assert json.loads(out.read_text()) == report
    assert left_behind(config) == [] and list((config.parent / "state" / "gate").iterdir()) == []


def test_a_fault_of_the_folder_ends_it_before_a_server_starts(
    config: Path, draft: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    rewrite(broken, lambda tensors: tensors.update({"fusion.weight": tensors.pop("fc.weight")}))
    status, report, said = gate(config, broken)
    assert status == 1 and not report["passed"]
    first = report["checks"][0]
    assert (first["name"], first["status"]) == ("files", "fail")
    assert "tensor fusion.weight is skipped silently by SGLang" in first["message"]
    assert report["checks"][1]["status"] == "not run" and "starting a server" not in said


def test_a_wrong_use_is_exit_status_2(config: Path, tmp_path: Path) -> None:
    status, _, said = gate(config, tmp_path / "nothing")
    assert status == 2 and "no config.json there" in said
