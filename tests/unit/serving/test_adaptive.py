"""What SGLang's adaptive speculation is started with."""

import json
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.unit.serving.fakes import write_target
from tide_platform.config import Settings
from tide_platform.evaluation.cost_model import FILE as COSTS
from tide_platform.evaluation.cost_model import BatchCosts, CostModel
from tide_platform.evaluation.speculation import Acceptance
from tide_platform.serving.adaptive import FILE, Adaptive, AdaptiveConfigUnusable, plan_adaptive
from tide_platform.serving.interpreter import Interpreter
from tide_platform.serving.launch import StagedDraft, plan_launch
from tide_platform.serving.preflight import Checked
from tide_platform.serving.serve import _plan
from tide_platform.serving.target_folder import Target

DIGEST = "aaaa"
MODEL = CostModel(
    {1: BatchCosts(40.0, 0.1, {1: 1.0, 2: 1.1, 3: 1.2}), 8: BatchCosts(60.0, 0.1, {1: 1.8, 2: 2.6, 3: 3.4})},
    DIGEST,
    {"dtype": "bfloat16", "device": "cpu", "date": "2026-11-30", "cores": 2},
)


def settings(state: Path, **serving: object) -> Settings:
    raw = {"adaptive": True, "port": free_port(), **serving}
    return Settings.model_validate({"state": state, "serving": raw})


def known(digest: str) -> Acceptance:
    return Acceptance([1.6, 1.9, 2.0], f"acceptance of {digest}")


def no_acceptance(digest: str) -> Acceptance:
    return Acceptance([], f"acceptance of draft {digest} is not known")


def never(digest: str) -> Acceptance:
    raise AssertionError("nobody need know")


def test_steps_are_written_from_the_cost_model(tmp_path: Path) -> None:
    MODEL.write(tmp_path / COSTS)
    found = plan_adaptive(settings(tmp_path), DIGEST, "bbbb", known)
    assert found.file == tmp_path / FILE
    written = json.loads((tmp_path / FILE).read_text())
    assert next(iter(written)) == "1" and max(written["1"]["candidate_steps"]) == found.start
    assert written[list(written)[-1]]["candidate_steps"][0] == 0
    assert "acceptance of bbbb" in found.reason and "measured 2026-11-30" in found.reason
    assert f"from batch 1 {written['1']['candidate_steps']}" in found.reason


def test_without_costs_or_acceptance_the_steps_are_sglangs_own_and_it_says_why(tmp_path: Path) -> None:
    found = plan_adaptive(settings(tmp_path), DIGEST, "bbbb", never)
    assert found.file is None and "no cost model was measured" in found.reason
    MODEL.write(tmp_path / COSTS)
    assert "another target" in plan_adaptive(settings(tmp_path), "other", "bbbb", never).reason
    found = plan_adaptive(settings(tmp_path), DIGEST, "bbbb", no_acceptance)
    assert found.file is None and "bbbb is not known" in found.reason
    assert not (tmp_path / FILE).exists()


def test_a_file_of_the_settings_goes_first(tmp_path: Path) -> None:
    MODEL.write(tmp_path / COSTS)
    own = tmp_path / "own.json"
    own.write_text('{"ema_alpha": 0.1, "1": {"candidate_steps": [4, 2]}, "8": {"candidate_steps": [0]}}')
    found = plan_adaptive(settings(tmp_path, adaptive_config=own), DIGEST, "bbbb", never)
    assert (found.file, found.start) == (own, 4) and not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[1]", "not an object"),
        ('{"1": [1, 3]}', "batch 1 has the candidate_steps None"),
        ('{"4": {"candidate_steps": [1, -1]}}', r"batch 4 has the candidate_steps \[1, -1\]"),
        ('{"4": {"candidate_steps": [true]}}', "batch 4 has"),
        ('{"4": {"candidate_steps": [0]}}', "serving.k 0 serves without"),
        ('{"alpha": 1}', "no batch size has a step"),
    ],
)
def test_a_file_that_sglang_would_not_start_with(tmp_path: Path, text: str | None, named: str) -> None:
    own = tmp_path / "own.json"
    if text is not None:
        own.write_text(text)
    with pytest.raises(AdaptiveConfigUnusable, match=named):
        plan_adaptive(settings(tmp_path, adaptive_config=own), DIGEST, "bbbb", never)


DRAFT = StagedDraft(Path("/state/drafts/bbbb"), "bbbb", (2, 15, 27))
PYTHON = Interpreter(Path("/venv/bin/python"), "0.5.14", ("llguidance",))


@pytest.mark.parametrize("file", [Path("/state/adaptive.json"), None])
def test_the_plan_starts_with_its_steps_and_file(tmp_path: Path, file: Path | None) -> None:
    target = Target(Path("/models/m"), DIGEST, "LlamaForCausalLM", 576, 30, 49152)
    plan = plan_launch(settings(tmp_path), target, DRAFT, PYTHON, Adaptive(file, 3, ""))
    line = " ".join(plan.argv)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in line
    assert "--speculative-adaptive" in line
    assert ("--speculative-adaptive-config /state/adaptive.json" in line) is (file is not None)


def test_serve_says_what_it_hands_over(tmp_path: Path) -> None:
    MODEL.write(tmp_path / COSTS)
    target = Target(write_target(tmp_path / "model"), DIGEST, "LlamaForCausalLM", 576, 30, 49152)
    said: list[str] = []
    checked = Checked(target, DRAFT, PYTHON)
    plan = _plan(settings(tmp_path), checked, said.append, known)
    assert f"--speculative-adaptive-config {tmp_path / FILE}" in " ".join(plan.argv)
    assert len(said) == 1 and said[0].startswith(f"adaptive speculation: {tmp_path / FILE} written: from")
    fixed = _plan(settings(tmp_path, adaptive=False), checked, said.append, never)
    alone = _plan(settings(tmp_path, k=0), Checked(target, None, PYTHON), said.append, never)
    assert len(said) == 1
    assert all("--speculative-adaptive" not in plan.argv for plan in (fixed, alone))
