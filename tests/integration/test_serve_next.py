"""``tide serve`` with SGLang 0.5.23, on the tiny target: serves plainly, refuses what a CPU cannot do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from test_serve import READY_S, TINY, Serve
from transformers import AutoModelForCausalLM

from tide_platform.serving.admin import read_admin_key
from tide_platform.serving.launch import base_url
from tide_platform.serving.processes import tree

pytestmark = pytest.mark.integration

NEXT = Path(__file__).parents[2] / ".venv-serving-next" / "bin" / "python"
ENVIRONMENT = {"TIDE_SERVING__PYTHON": str(NEXT), "TIDE_SERVING__DTYPE": "float32"}
PROMPT = list(b"The sky is blue because the")


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Serve]:
    serving = Serve(tmp_path, TINY, "--k", "0", env=ENVIRONMENT)
    serving.wait_ready()
    yield serving
    if serving.process.poll() is None:
        serving.process.terminate()
        serving.process.wait(60)
    serving.assert_nothing_left()


def ask(serving: Serve, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    key = {"Authorization": f"Bearer {read_admin_key(serving.settings)}"}
    with httpx.Client(base_url=base_url(serving.settings), headers=key, timeout=60, trust_env=False) as http:
        return http.get(path) if body is None else http.post(path, json=body)


def of_transformers(tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()


def test_it_serves_what_the_model_says_with_the_plugin_live(plain: Serve) -> None:
    sampling = {
        "max_new_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": {"tide": {"train": "deny", "tenant": "a"}},
    }
    reply = ask(plain, "/generate", {"input_ids": PROMPT, "sampling_params": sampling}).json()
    assert reply["output_ids"] == of_transformers(16)

    status = ask(plain, "/tide/status").json()
    assert status["sglang"] == "0.5.23" and status["missing_hooks"] == []
    assert status["draft_digest"] is None and status["capture"]["live"] is False
    answer = ask(plain, "/tide/capture", {"enabled": True})
    assert answer.status_code == 400 and answer.json()["type"] == "NoCapture"

    for path, body in {
        "/update_weights_from_disk": {"model_path": str(TINY)},
        "/begin_weight_update": {},
    }.items():
        refused = ask(plain, path, body)
        assert refused.status_code == 400 and "refused: the served target is fixed" in refused.text, path

    plain.members = tree(plain.process.pid)
    plain.process.terminate()
    assert plain.process.wait(60) == 0, plain.output.read_text()


def test_speculation_on_a_cpu_is_refused_by_name(tmp_path: Path) -> None:
    serving = Serve(tmp_path, TINY, "--k", "2", env=ENVIRONMENT)
    assert serving.process.wait(READY_S) == 2
    assert "error: EAGLE3 on a CPU with sglang 0.5.23: not supported" in serving.output.read_text()
