"""Both adapters against the SGLang they are for: names, signatures, messages, launch plan. See ``probe.py``.

Each version is asked in its own environment (``make setup``, ``make setup-next``), in one process a version.
"""

import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.contract.checks import CHECKS
from tide_platform.config import Settings
from tide_platform.engine.support import ADAPTERS
from tide_platform.serving.interpreter import Interpreter
from tide_platform.serving.launch import StagedDraft, plan_launch
from tide_platform.serving.target_folder import Target

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny_target"
VENVS = {"0.5.14": ".venv-serving", "0.5.23": ".venv-serving-next"}
# what hooks.py and routes.py read of ServerArgs, beside the support table
ARGUMENTS = (
    "speculative_use_rejection_sampling",
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "speculative_draft_model_path",
    "admin_api_key",
)
# refused feature -> flags that ask for it, on a speculative server
REFUSED = {
    "other speculative algorithms": ["--speculative-algorithm", "EAGLE"],
    "a tree of drafts (speculative_eagle_topk > 1)": ["--speculative-eagle-topk", "2"],
    "mixed chunks (enable_mixed_chunk)": ["--enable-mixed-chunk"],
    "DP attention with local control messages (enable_dp_attention_local_control_broadcast)": [
        "--enable-dp-attention-local-control-broadcast"
    ],
    "context parallelism (attn_cp_size > 1)": ["--attn-cp-size", "2"],
    "pipeline parallelism (pp_size > 1)": ["--pp-size", "2"],
    "prefill/decode disaggregation": ["--disaggregation-mode", "prefill"],
    "several tokenizer workers (tokenizer_worker_num > 1)": ["--tokenizer-worker-num", "2"],
    "a quantised draft": ["--speculative-draft-model-quantization", "fp8"],
}


def launch_plans(folder: Path, sglang: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Command lines by name, and an engine configuration that captures."""
    target = Target(TINY, "t", "LlamaForCausalLM", 64, 4, 256)
    draft = StagedDraft(folder / "draft", "d", (2, 15, 27))
    interpreter = Interpreter(Path("python"), sglang, ("xgrammar", "llguidance"))

    def plan(draft: StagedDraft | None, **serving: Any) -> Any:
        base = {"context_length": 256, "max_total_tokens": 2048, "radix_cache": False}
        capture = {"target_signal": "last_hidden"}  # with every hook that there is
        raw = {"state": str(folder), "serving": base | serving, "capture": capture}
        settings = Settings.model_validate(raw)
        return plan_launch(settings, target, draft, interpreter)

    plans = {
        "cpu": plan(None, k=0),
        "cpu_k2": plan(draft, k=2),
        "cuda": plan(draft, device="cuda", k=3),
        "rocm": plan(draft, device="rocm", k=3, accept_lossy=True),
        "cuda_dp": plan(draft, device="cuda", k=3, tp_size=4, dp_size=2, dp_attention=True),
    }
    engine = plans["cuda"].engine.model_dump(mode="json")
    return {name: list(one.argv) for name, one in plans.items()}, engine


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    @cache
    def probe(sglang: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("contract")
        argvs, engine = launch_plans(folder, sglang)
        given = {"argvs": argvs, "engine": engine, "refused": REFUSED, "arguments": ARGUMENTS}
        (folder / "given.json").write_text(json.dumps(given))
        python = ROOT / VENVS[sglang] / "bin" / "python"
        command = [
            python,
            "-W",
            "ignore",
            "-m",
            "tests.contract.probe",
            folder / "given.json",
            folder / "out.json",
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads((folder / "out.json").read_text())

    return probe


def test_every_adapter_has_an_environment() -> None:
    assert VENVS.keys() == ADAPTERS.keys()
    assert version("tide-platform")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sglang", ADAPTERS)
def test_keeps(probed: Callable[[str], dict[str, Any]], sglang: str, check: str) -> None:
    result = probed(sglang)
    assert result["version"] == sglang
    assert result["checks"][check] is None, result["checks"][check]


@pytest.mark.parametrize("sglang", ADAPTERS)
def test_a_wrong_name_is_found(probed: Callable[[str], dict[str, Any]], sglang: str) -> None:
    mutants = probed(sglang)["mutants"]
    assert len(mutants) >= 12
    assert not [name for name, found in mutants.items() if found is None]
