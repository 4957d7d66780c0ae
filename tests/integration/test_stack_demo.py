"""The demo with everything real but the size of the target: interrupted once, then from there to its end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tide_platform.local.demo.summary import Summary
from tide_platform.local.leftovers import find_leftovers

pytestmark = [pytest.mark.integration, pytest.mark.faults]

HERE = Path(__file__).parent
TINY = HERE.parent / "fixtures" / "tiny_target"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained draft, and a workload of the kind of text that the tiny target was trained on."""
    from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft

    folder = tmp_path_factory.mktemp("demo")
    draft = new_draft(load_target_parts(TINY), np.arange(10, 138), seed=0)
    save_draft(folder / "draft", draft, {"made_by": "test"})
    text = (HERE.parent / "fixtures" / "tiny_prompts.txt").read_text()
    with (folder / "lines.jsonl").open("w") as file:
        for place, start in enumerate(range(0, 60 * 48, 48)):
            split = "held_out" if place % 5 == 0 else "traffic"
            file.write(json.dumps({"prompt": text[start : start + 32].strip() + " x", "split": split}) + "\n")
    return folder


def _demo(folder: Path, until: Callable[[str], bool]) -> tuple[int, str]:
    """Run the small demo; SIGINT when a line of its output satisfies ``until``: (exit status, output)."""
    command = [sys.executable, "-u", str(HERE / "small_demo.py")]
    command += [str(folder / name) for name in ("state", "draft", "lines.jsonl")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as demo:
        assert demo.stdout is not None
        lines = []
        for line in demo.stdout:
            lines.append(line)
            if until(line):
                demo.send_signal(signal.SIGINT)
        return demo.wait(60), "".join(lines)


@pytest.mark.timeout(900)
def test_interrupted_and_then_to_its_end(folder: Path) -> None:
    status, output = _demo(folder, until=lambda line: "capturing the reference set" in line)
    assert status == 130, output
    assert find_leftovers(folder / "state") == []
    assert not (folder / "state" / "demo" / "summary.json").exists()

    status, output = _demo(folder, until=lambda line: False)
    assert status == 0, output
    assert find_leftovers(folder / "state") == []
    summary = Summary.model_validate_json((folder / "state" / "demo" / "summary.json").read_text())
    assert summary.outcome == "deployed", output
    assert summary.dagster.launched_by == "enough_hidden_states"
    assert summary.window.samples == 32 and summary.samples_dropped == 0
    assert summary.mlflow.alias == "champion" and summary.mlflow.model_version == "2"
    assert summary.adapted is not None and summary.served_draft == summary.adapted.draft
    assert summary.adapted.draft != summary.static.draft
    assert summary.ratio is not None and summary.ratio.acceptance_length > 1.05
    assert (folder / "state" / "demo" / "index.html").read_text().count("<svg") == 3
