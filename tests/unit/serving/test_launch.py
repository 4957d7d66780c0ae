import json
from pathlib import Path

import pytest

from tide_platform.config import Settings
from tide_platform.serving.interpreter import Interpreter
from tide_platform.serving.launch import StagedDraft, base_url, plan_launch, server_env
from tide_platform.serving.target_folder import Target

TARGET = Target(Path("/models/m"), "aaaa", "LlamaForCausalLM", 576, 30, 49152)
DRAFT = StagedDraft(Path("/state/drafts/bbbb"), "bbbb", (2, 15, 27))
PYTHON = Interpreter(Path("/venv/bin/python"), "0.5.14", ("xgrammar", "llguidance"))

COMMON = [
    "/venv/bin/python -m sglang.launch_server",
    "--model-path /models/m",
    "--served-model-name m",
    "--host 127.0.0.1",
    "--port 30000",
    "--dtype bfloat16",
    "--context-length 1024",
    "--max-running-requests 16",
    "--tp-size 1",
    "--chunked-prefill-size 2048",
    "--max-total-tokens 16384",
]
CPU = [
    "--device cpu --attention-backend torch_native --sampling-backend pytorch",
    "--disable-overlap-schedule --disable-cuda-graph --sleep-on-idle --grammar-backend llguidance",
]
REST = ["--enable-metrics --skip-server-warmup --log-level warning"]
SPECULATIVE = [
    "--speculative-algorithm EAGLE3",
    "--speculative-draft-model-path /state/drafts/bbbb",
    "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3",
    "--speculative-accept-threshold-single 1.0 --speculative-accept-threshold-acc 1.0",
]
DEVICES = {
    "cpu": CPU,
    "cuda": ["--device cuda --disable-overlap-schedule --grammar-backend xgrammar"],
    "rocm": ["--device cuda --attention-backend aiter --disable-overlap-schedule --grammar-backend xgrammar"],
}


def settings(**serving: object) -> Settings:
    return Settings.model_validate({"state": "/state", "serving": serving})


@pytest.mark.parametrize("device", DEVICES)
def test_command_line_with_a_draft(device):
    plan = plan_launch(settings(device=device), TARGET, DRAFT, PYTHON)
    assert " ".join(plan.argv) == " ".join([*COMMON, *DEVICES[device], *REST, *SPECULATIVE])


def test_command_line_without_speculation():
    plan = plan_launch(settings(k=0), TARGET, None, PYTHON)
    assert " ".join(plan.argv) == " ".join([*COMMON, *CPU, *REST])
    assert plan.engine.draft_digest is None
    assert plan.spool_argv is None and plan.ring_path is None and not plan.engine.capture_enabled


def test_graphs_and_overlap_on_a_gpu_without_speculation():
    argv = plan_launch(settings(k=0, device="cuda"), TARGET, None, PYTHON).argv
    assert "--disable-cuda-graph" not in argv and "--disable-overlap-schedule" not in argv


def test_every_serving_setting_reaches_the_command_line():
    changed = {
        "dtype": "float32",
        "context_length": 333,
        "max_running_requests": 3,
        "max_total_tokens": 444,
        "radix_cache": False,
        "chunked_prefill_size": 64,
        "tp_size": 4,
        "dp_size": 2,
        "dp_attention": True,
        "log_level": "debug",
        "accept_threshold_single": 0.5,
        "accept_threshold_acc": 0.25,
        "k": 4,
        "port": 31234,
        "host": "0.0.0.0",
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
        "adaptive": True,
        "adaptive_config": "/adaptive.json",
    }
    line = " ".join(plan_launch(settings(device="cuda", **changed), TARGET, DRAFT, PYTHON).argv)
    for words in ("float32", "333", "--max-running-requests 3", "444", "--disable-radix-cache", "-size 64"):
        assert words in line
    for words in (
        "--tp-size 4 --dp-size 2 --enable-dp-attention",
        "debug",
        "single 0.5",
        "acc 0.25",
        "num-steps 4",
        "tokens 5",
        "31234",
        "0.0.0.0",
        "--reasoning-parser qwen3",
        "--tool-call-parser hermes",
        "--speculative-adaptive --speculative-adaptive-config /adaptive.json",
    ):
        assert words in line


def test_replicas_are_asked_for_where_there_are_several():
    line = " ".join(plan_launch(settings(dp_size=3), TARGET, DRAFT, PYTHON).argv)
    assert "--dp-size 3" in line and "dp-attention" not in line
    assert "--dp-size" not in plan_launch(settings(), TARGET, DRAFT, PYTHON).argv


def test_no_token_limit_lets_the_server_measure():
    plan = plan_launch(settings(device="cuda", max_total_tokens=None), TARGET, DRAFT, PYTHON)
    assert "--max-total-tokens" not in plan.argv


def test_environment_of_each_device():
    cpu = server_env(settings(threads=3))
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1" and cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["GOMP_SPINCOUNT"] == "200000" and cpu["HF_HUB_OFFLINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_env(settings(device="cuda"))
    assert server_env(settings(device="rocm"))["SGLANG_USE_AITER"] == "1"
    assert server_env(settings(device="rocm", attention_backend="triton"))["SGLANG_USE_AITER"] == "0"


def test_what_the_plugin_is_told():
    plan = plan_launch(settings(), TARGET, DRAFT, PYTHON)
    assert plan.env["TIDE_ENGINE_CONFIG"] == str(plan.engine_config_path)
    assert json.loads(plan.engine.model_dump_json()) == {
        "deployment": "demo",
        "device": "cpu",
        "target_digest": "aaaa",
        "hidden_size": 576,
        "vocab_size": 49152,
        "aux_layer_ids": [2, 15, 27],
        "draft_digest": "bbbb",
        "drafts_root": "/state/drafts",
        "capture_enabled": True,
        "capture_default": "allow",
        "deny_tenants": [],
        "allow_tenants": None,
        "trusted_proxies": ["127.0.0.0/8", "::1/128"],
        "bytes_per_second": None,
        "prompt_tail_tokens": None,
        "max_request_tokens": None,
        "sampling_rate": 1.0,
        "teacher_k": 16,
        "target_signal": "topk",
        "ring_path": "/state/spool/server.ring",
        "ring_bytes": 256 << 20,
    }


def test_no_secret_in_the_plan(monkeypatch):
    monkeypatch.setenv("TIDE_ADMIN_KEY", "hunter2")
    assert "hunter2" not in repr(plan_launch(settings(), TARGET, DRAFT, PYTHON))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),
        ("::", "http://[::1]:30000"),
        ("::1", "http://[::1]:30000"),
        ("example", "http://example:30000"),
    ],
)
def test_base_url(host, url):
    assert base_url(settings(host=host)) == url
