"""Captured rows of a real SGLang, fp32, against transformers on the same tokens."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_server import AUX_LAYERS, EngineServer

from tide_platform.capture.record import Sample

pytestmark = pytest.mark.integration

REPEATS = " c c c c c c c c"
THINGS = ["apple", "pear", "book", "lamp"] * 4
LONG = " ".join(f"Item {i} is a {thing} for {i * 7 % 31} coins." for i, thing in enumerate(THINGS))
# rid -> (prompt, chat?, sampling); requests of one line of BATCHES run together
BATCHES: list[dict[str, tuple[str, bool, dict[str, Any]]]] = [
    {
        "repeats": (REPEATS, False, {"max_new_tokens": 24}),
        "chat": ("Name three colours.", True, {"max_new_tokens": 20}),
        "mixed": (" a b c a b c a b c a b c", False, {"max_new_tokens": 40}),
        "chunked": (LONG, False, {"max_new_tokens": 8}),
    },
    {"eos": ("What is the capital of France?", True, {"max_new_tokens": 64})},
    {"prefix_hit": ("What is the capital of France?", True, {"max_new_tokens": 64})},
    {
        "length_5": ("1" + REPEATS, False, {"max_new_tokens": 5}),
        "length_6": ("2" + REPEATS, False, {"max_new_tokens": 6}),
        "length_7": ("3" + REPEATS, False, {"max_new_tokens": 7}),
        "stop_string": ("4" + REPEATS, False, {"max_new_tokens": 40, "stop": [" c c c c c"]}),
    },
    {
        "penalties": ("5" + REPEATS, False, {"max_new_tokens": 12, "frequency_penalty": 1.2}),
        "bias": ("6" + REPEATS, False, {"max_new_tokens": 12, "logit_bias": {"42": 30.0}}),
    },
    {"grammar": ("The year of the moon landing: ", False, {"max_new_tokens": 8, "regex": "[0-9]{4} c c c"})},
    {
        "sampled": (
            "Once upon a time",
            False,
            {"max_new_tokens": 16, "temperature": 0.8, "top_p": 0.9, "top_k": 50},
        ),
        "beside_sampled": ("7" + REPEATS, False, {"max_new_tokens": 12}),
    },
]
RAW = ("penalties", "bias", "grammar")  # their tokens are not what the raw logits would choose
CASES = [rid for batch in BATCHES for rid in batch]


@dataclass
class Traffic:
    """What was asked, answered and captured."""

    prompts: dict[str, list[int]] = field(default_factory=dict)
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)


class Reference:
    """The target in transformers, fp32."""

    def __init__(self, target: Path):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def __call__(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(aux [T, 3H], log-probabilities [T, V]) of a sequence."""
        with torch.no_grad():
            out = self.model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer][0] for layer in AUX_LAYERS], -1)
        return aux.numpy(), torch.log_softmax(out.logits[0].float(), -1).numpy()


@pytest.fixture(scope="module")
def tokenize(target: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))

    def encode(text: str, chat: bool = False) -> list[int]:
        if chat:
            text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return tokenizer.encode(text).ids

    return encode


@pytest.fixture(scope="module")
def reference(target: Path) -> Reference:
    return Reference(target)


@pytest.fixture(scope="module")
def traffic(speculative: EngineServer, tokenize: Any) -> Iterator[Traffic]:
    speculative.call("POST", "/tide/capture", {"enabled": True, "sampling_rate": 1.0})
    done = Traffic()
    for batch in BATCHES:
        prompts = {rid: tokenize(text, chat) for rid, (text, chat, _) in batch.items()}
        replies = speculative.generate(
            list(prompts.values()), [s for _, _, s in batch.values()], list(prompts)
        )
        done.prompts |= prompts
        done.replies |= {reply["meta_info"]["id"]: reply for reply in replies}
    done.samples = speculative.samples(CASES)
    yield done


def assert_truth(sample: Sample, reference: Reference) -> None:
    """Each captured row is the reference's row of its position, to the rounding of what is stored."""
    meta, tensors = sample.meta, sample.tensors
    aux, logp = reference(tensors["input_ids"])
    rows, teachers = tensors["row_pos"], tensors["teacher_pos"]
    captured = torch.from_numpy(tensors["aux"].view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    width = aux.shape[1] // 3
    for part in range(3):
        of = slice(part * width, (part + 1) * width)
        length = np.linalg.norm(aux[rows, of], axis=1)
        error = np.linalg.norm(captured[:, of] - aux[rows, of], axis=1) / length
        assert error.max() < 4e-3, f"{meta.request_id}: aux layer {part}, row {rows[error.argmax()]}"
    expected = np.take_along_axis(logp[teachers], tensors["teacher_ids"], 1)
    np.testing.assert_allclose(tensors["teacher_logp"], expected, atol=2e-2, rtol=2e-3)
    top = -np.sort(-logp[teachers], axis=1)[:, : expected.shape[1]]
    np.testing.assert_allclose(tensors["teacher_logp"], top, atol=2e-2, rtol=2e-3)
    emitted = teachers + 1 < meta.num_tokens
    following = tensors["input_ids"][teachers[emitted] + 1]
    token_logp = tensors["token_logp"][emitted].astype(np.float32)
    np.testing.assert_allclose(token_logp, logp[teachers[emitted], following], atol=2e-2, rtol=2e-3)
    assert np.isnan(tensors["token_logp"][~emitted]).all()


def assert_covers(sample: Sample) -> None:
    """Rows from the first to the last but one token, teachers of the response; the last one is optional."""
    meta, tensors = sample.meta, sample.tensors
    rows, teachers, end = tensors["row_pos"], tensors["teacher_pos"], meta.num_tokens
    first = rows[0]
    assert rows.tolist() in (list(range(first, end - 1)), list(range(first, end)))
    assert teachers.tolist() in (
        list(range(meta.prompt_tokens, end - 1)),
        list(range(meta.prompt_tokens, end)),
    )


@pytest.mark.parametrize("rid", CASES)
def test_rows_are_the_reference_rows(rid: str, traffic: Traffic, reference: Reference) -> None:
    sample, reply = traffic.samples[rid], traffic.replies[rid]
    prompt, output = traffic.prompts[rid], reply["output_ids"]
    ids = sample.tensors["input_ids"].tolist()
    assert ids[: len(prompt) + len(output)] == prompt + output
    assert len(ids) - len(prompt) == reply["meta_info"]["completion_tokens"]
    assert_covers(sample)
    assert_truth(sample, reference)


@pytest.mark.parametrize("rid", CASES)
def test_what_is_said_of_a_sample(rid: str, traffic: Traffic, speculative: EngineServer) -> None:
    meta, reply = traffic.samples[rid].meta, traffic.replies[rid]["meta_info"]
    sampling = next(batch[rid][2] for batch in BATCHES if rid in batch)
    status = speculative.status()
    assert meta.prompt_tokens == len(traffic.prompts[rid]) and meta.start_pos == 0
    assert (meta.verify_rounds, meta.accepted_drafts) == (
        reply["spec_verify_ct"],
        reply["spec_num_correct_drafts"],
    )
    assert meta.k == 2 and meta.finish_reason == reply["finish_reason"]["type"]
    assert meta.temperature == sampling.get("temperature", 0)
    assert meta.top_p == sampling.get("top_p", 1) and meta.verify_rule == "target_only"
    assert meta.target_digest == status["target_digest"] and meta.tenant == "default"
    assert ("penalties" in meta.flags) == (rid in ("penalties", "bias"))
    assert ("grammar" in meta.flags) == (rid == "grammar")
    assert ("truncated_context" in meta.flags) == (traffic.samples[rid].tensors["row_pos"][0] > 0)


def test_greedy_tokens_are_the_teachers_first(traffic: Traffic) -> None:
    for rid in set(CASES) - {*RAW, "sampled"}:
        tensors = traffic.samples[rid].tensors
        teachers = tensors["teacher_pos"][tensors["teacher_pos"] + 1 < len(tensors["input_ids"])]
        following = tensors["input_ids"][teachers + 1]
        assert following.tolist() == tensors["teacher_ids"][: len(teachers), 0].tolist(), rid


def test_raw_rows_differ_from_what_was_said(traffic: Traffic) -> None:
    """Else the cases of penalties and grammar would show nothing."""
    for rid in RAW:
        tensors = traffic.samples[rid].tensors
        teachers = tensors["teacher_pos"][tensors["teacher_pos"] + 1 < len(tensors["input_ids"])]
        assert (tensors["input_ids"][teachers + 1] != tensors["teacher_ids"][: len(teachers), 0]).any(), rid


def test_the_cases_hold_accepted_and_rejected_drafts_and_stops_within_a_run(traffic: Traffic) -> None:
    metas = [sample.meta for sample in traffic.samples.values()]
    assert any(meta.accepted_drafts > meta.verify_rounds for meta in metas)
    assert any(0 < meta.accepted_drafts < 2 * meta.verify_rounds for meta in metas)
    within = [rid for rid, s in traffic.samples.items() if s.tensors["row_pos"][-1] == s.meta.num_tokens - 1]
    assert within, "no request stopped inside a run of accepted drafts"
    assert traffic.samples["eos"].meta.finish_reason == "stop"
    assert traffic.samples["chunked"].meta.prompt_tokens > 2 * 64


def test_a_prefix_hit_leaves_a_hole(traffic: Traffic) -> None:
    hit = traffic.samples["prefix_hit"]
    cached = traffic.replies["prefix_hit"]["meta_info"]["cached_tokens"]
    assert cached > 0
    assert hit.tensors["row_pos"][0] == cached
    assert "truncated_context" in hit.meta.flags
    assert hit.tensors["input_ids"].tolist() == traffic.samples["eos"].tensors["input_ids"].tolist()


def test_an_aborted_request_ends_its_sample(
    speculative: EngineServer, tokenize: Any, reference: Reference
) -> None:
    prompt = tokenize("8" + REPEATS)
    asked = threading.Thread(
        target=speculative.generate_one,
        args=(prompt, "aborted"),
        kwargs={"max_new_tokens": 600, "ignore_eos": True},
    )
    asked.start()
    until = time.monotonic() + 60
    while speculative.status()["capture"]["open"] == 0 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)
    with speculative.client() as client:
        client.post("/abort_request", json={"rid": "aborted"})
    asked.join(60)
    sample = speculative.samples(["aborted"])["aborted"]
    assert "aborted" in sample.meta.flags and sample.meta.finish_reason == "abort"
    assert len(prompt) < sample.meta.num_tokens < 600
    assert_covers(sample)
    assert_truth(sample, reference)


def test_retracted_requests_are_whole(speculative: EngineServer, tokenize: Any, reference: Reference) -> None:
    """More requests than the KV cache holds: SGLang throws some out and prefills them again."""
    rids = [f"crowd_{i}" for i in range(6)]
    prompts = [tokenize(f"{i}{i}" + REPEATS * 2) for i in range(6)]
    replies = speculative.generate(prompts, {"max_new_tokens": 160, "ignore_eos": True}, rids)
    samples = speculative.samples(rids)
    retracted = [rid for rid, sample in samples.items() if "retracted" in sample.meta.flags]
    assert retracted, [reply["meta_info"]["num_retractions"] for reply in replies]
    for rid in retracted[:2]:
        assert samples[rid].meta.num_tokens == len(prompts[0]) + 160
        assert_covers(samples[rid])
        assert_truth(samples[rid], reference)


def test_opt_out_tenants_and_sampling(speculative: EngineServer, tokenize: Any) -> None:
    prompt = tokenize("9" + REPEATS)
    before = speculative.status()["capture"]

    def ask(rid: str, **options: str) -> None:
        custom = {"custom_params": {"tide": options}} if options else {}
        speculative.generate_one(prompt, rid, max_new_tokens=4, **custom)

    ask("denied", train="deny")
    speculative.call("POST", "/tide/capture", {"deny_tenants": ["acme"]})
    ask("tenant", tenant="acme", train="allow")
    speculative.call("POST", "/tide/capture", {"deny_tenants": [], "sampling_rate": 0})
    ask("unlucky")
    speculative.call("POST", "/tide/capture", {"sampling_rate": 1, "enabled": False})
    ask("off")
    speculative.call("POST", "/tide/capture", {"enabled": True})
    ask("kept", tenant="acme")
    assert speculative.samples(["kept"])["kept"].meta.tenant == "acme"
    after = speculative.status()["capture"]
    assert after["samples"] - before["samples"] == 1
    grown = {name: n - before["skipped"].get(name, 0) for name, n in after["skipped"].items()}
    assert {name: grown.get(name) for name in ("opt_out", "tenant", "sampled_out", "disabled")} == {
        "opt_out": 1,
        "tenant": 1,
        "sampled_out": 1,
        "disabled": 1,
    }


def test_nothing_is_left_open_or_lost(traffic: Traffic, speculative: EngineServer, tokenize: Any) -> None:
    speculative.generate_one(tokenize("Hello"), "one_token", max_new_tokens=1)
    capture = speculative.status()["capture"]
    assert capture["live"] and capture["error"] is None
    assert (capture["open"], capture["dropped"]) == (0, {})
    assert capture["skipped"]["no_response"] >= 1
