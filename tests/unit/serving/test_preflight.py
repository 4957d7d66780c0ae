import json
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.free_ports import free_port as unused
from tests.unit.serving.fakes import write_target
from tide_platform.config import Settings, TideError
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.serving.drafts import DraftMissing
from tide_platform.serving.interpreter import InterpreterUnusable, probe_interpreter
from tide_platform.serving.preflight import (
    LossyVerifyRule,
    PortBusy,
    ServingImpossible,
    check_port,
    check_settings,
    check_verify_rule,
    preflight,
)

TINY = Path(__file__).parents[2] / "fixtures" / "tiny_target"


def settings(**serving: object) -> Settings:
    return Settings.model_validate({"serving": serving})


@pytest.fixture
def free_port():
    return unused()


def test_busy_port_names_port_holder_and_setting():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortBusy, match=rf"port {port} .* \(pid \d+\).*serving.port"):
            check_port("127.0.0.1", port)


def test_free_port(free_port):
    check_port("127.0.0.1", free_port)


def test_an_address_of_another_machine(free_port):
    with pytest.raises(ServingImpossible, match=r"192\.0\.2\.1"):
        check_port("192.0.2.1", free_port)


@pytest.mark.parametrize(
    "serving",
    [
        {"device": "rocm"},
        {"accept_threshold_single": 0.9},
        {"accept_threshold_acc": 0.9, "device": "cuda"},
    ],
)
def test_lossy_rules_are_refused_by_name(serving):
    with pytest.raises(LossyVerifyRule, match="accept_lossy"):
        check_verify_rule(settings(**serving), "0.5.14")
    check_verify_rule(settings(**serving, accept_lossy=True), "0.5.14")
    check_verify_rule(settings(**serving, k=0), "0.5.14")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lossless_rules_pass(device):
    check_verify_rule(settings(device=device), "0.5.14")


@pytest.mark.parametrize(
    ("serving", "named"),
    [
        ({"attention_backend": "flashinfer"}, "attention_backend flashinfer"),
        ({"tp_size": 2}, "tp_size 2"),
        ({"dp_attention": True, "device": "cuda", "tp_size": 2}, "dp_size must be at least 2"),
        ({"dp_attention": True, "device": "cuda", "tp_size": 3, "dp_size": 2}, "and divide tp_size"),
        ({"max_total_tokens": 512, "context_length": 1024}, "max_total_tokens 512"),
    ],
)
def test_impossible_settings(serving, named):
    with pytest.raises(ServingImpossible, match=named):
        preflight(settings(**serving))


def test_padded_rows_have_no_last_hidden_states():
    padded = settings(device="cuda", tp_size=4, dp_size=2, dp_attention=True)
    check_settings(padded)
    padded.capture.target_signal = "last_hidden"
    with pytest.raises(ServingImpossible, match="dp_attention"):
        check_settings(padded)


def test_an_interpreter_that_is_not_there(tmp_path):
    with pytest.raises(InterpreterUnusable, match=r"serving\.python"):
        probe_interpreter(tmp_path / "python", ["0.5.14"])


def fake_python(tmp_path, answer: str):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ('{"sglang": null, "plugin": true, "grammar": ["xgrammar"]}', "has no SGLang"),
        (
            '{"sglang": "0.4.1", "plugin": true, "grammar": ["xgrammar"]}',
            r"sglang 0\.4\.1; adapters exist for 0\.5\.14",
        ),
        ('{"sglang": "0.5.14", "plugin": false, "grammar": ["xgrammar"]}', "lacks the plugin"),
    ],
)
def test_an_interpreter_that_cannot_serve(tmp_path, answer, named):
    with pytest.raises(InterpreterUnusable, match=named):
        probe_interpreter(fake_python(tmp_path, answer), ["0.5.14"])


def test_missing_draft_names_the_setting(tmp_path, monkeypatch, free_port):
    python = fake_python(tmp_path, '{"sglang": "0.5.14", "plugin": true, "grammar": []}')
    target = write_target(tmp_path / "model")
    raw = {"target": target, "draft": tmp_path / "none", "state": tmp_path / "state"}
    ready = Settings.model_validate(raw | {"serving": {"python": python, "port": free_port}})
    with pytest.raises(DraftMissing, match=r"none.*`draft`"):
        preflight(ready)
    ready.serving.k = 0
    checked = preflight(ready)
    assert checked.draft is None and checked.interpreter.grammar == ()


def test_every_refusal_is_one_line():
    for error in (LossyVerifyRule("x"), PortBusy("h", 1, "")):
        assert isinstance(error, TideError) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "EAGLE"),
        ({"vocab_size": 300}, "vocab_size"),
        ({"hidden_size": 64}, "hidden_size"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "layer"),
    ],
)
def test_a_wrong_draft_is_refused_in_one_line(tmp_path, free_port, change, named):
    python = fake_python(tmp_path, '{"sglang": "0.5.14", "plugin": true, "grammar": ["xgrammar"]}')
    draft = tmp_path / "draft"
    save_draft(draft, new_draft(load_target_parts(TINY), np.arange(64, 192), seed=0), {})
    ready = Settings.model_validate(
        {
            "target": TINY,
            "draft": draft,
            "state": tmp_path / "state",
            "serving": {"python": python, "port": free_port},
        }
    )
    assert preflight(ready).draft.aux_layer_ids
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(TideError, match=named) as refused:
        preflight(ready)
    assert "\n" not in str(refused.value)
