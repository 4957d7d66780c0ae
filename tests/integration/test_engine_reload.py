"""Reload of the draft alone in a real SGLang: lossless, in place, confined, behind the admin key."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_drafts import VOCABULARY, lens_draft, random_draft
from engine_server import KEY, EngineServer, stage
from safetensors.torch import load_file, save_file

from tide_platform.config import draft_digest

pytestmark = pytest.mark.integration

REPEATS = " c c c c c c c c"
PROMPTS = [
    REPEATS,
    " a b c a b c a b c",
    "the the the the the the",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
    "def fib(n):\n",
    "The sky is",
    "Once upon a time there was",
    "1 2 3 4 5 6 7",
    "Paris is the capital of",
    "import os\nimport sys\n",
    "She said that",
    "A list of fruits: apple, pear,",
    " y y y y y y y y y",
    "In 1969 the first",
    "x = x + 1\nx = x + 1\n",
]
RIDS = [f"lossless_{i}" for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def prompts(target: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def answers(server: EngineServer, prompts: list[list[int]], tag: str) -> tuple[list[list[int]], int]:
    """Greedy tokens of the 16 prompts, run together, and the number of accepted drafts."""
    rids = [f"{tag}_{rid}" for rid in RIDS]
    replies = server.generate(prompts, {"max_new_tokens": 20}, rids)
    accepted = sum(reply["meta_info"].get("spec_num_correct_drafts", 0) for reply in replies)
    return [reply["output_ids"] for reply in replies], accepted


@pytest.fixture(scope="module")
def plain(server: Callable[..., EngineServer], prompts: list[list[int]]) -> list[list[int]]:
    """What the target says without speculation."""
    alone = server(None, radix_cache=False)
    status = alone.status()
    assert status["draft_digest"] is None and status["capture"]["live"] is False
    said, _ = answers(alone, prompts, "plain")
    alone.end()
    return said


def test_output_is_the_targets_before_and_after_each_reload(
    speculative: EngineServer,
    plain: list[list[int]],
    prompts: list[list[int]],
    target: Path,
    draft: Path,
    tmp_path: Path,
) -> None:
    first = speculative.status(checksums=True)
    assert first["draft_digest"] == draft_digest(draft)
    said, accepted = answers(speculative, prompts, "first")
    assert said == plain
    assert accepted > 5
    # another map of the same length, in which the tokens that repeat stand at other places
    repeated = torch.tensor([prompts[0][-1], prompts[13][-1]])
    ids = torch.cat([repeated, torch.arange(VOCABULARY, 2 * VOCABULARY)]).unique()[:VOCABULARY]
    drafts = {
        "random": random_draft(target, tmp_path / "random"),
        "embeddings": lens_draft(target, tmp_path / "embeddings", embed_tokens=True),
        "other_map": lens_draft(target, tmp_path / "other_map", ids=ids),
        "first_again": draft,
    }
    hits = {}
    for name, folder in drafts.items():
        staged = stage(folder, speculative.drafts)
        reply = speculative.reload(staged)
        status = speculative.status(checksums=True)
        assert reply["ok"] and reply["digest"] == status["draft_digest"] == draft_digest(folder)
        assert reply["target_checksum_before"] == reply["target_checksum_after"]
        assert status["target_checksum"] == first["target_checksum"]
        assert status["weights_checksum"] == reply["weights_checksum"] == reply["ranks"][0]
        assert reply["ignored_tensors"] == (["embed_tokens.weight"] if name == "embeddings" else [])
        said, hits[name] = answers(speculative, prompts, name)
        assert said == plain, name
    assert hits["random"] == 0, "the random draft was not loaded"
    assert hits["embeddings"] == hits["first_again"] == accepted
    assert hits["other_map"] > 0, "the other vocabulary map was not loaded"
    assert speculative.status(checksums=True)["weights_checksum"] == first["weights_checksum"]


def test_a_running_request_goes_on(
    speculative: EngineServer, prompts: list[list[int]], target: Path, draft: Path, tmp_path: Path
) -> None:
    other = stage(random_draft(target, tmp_path / "random", seed=1), speculative.drafts)
    sampling = {"max_new_tokens": 90, "ignore_eos": True}
    alone = speculative.generate_one(prompts[7], "undisturbed", **sampling)["output_ids"]
    replies: list[dict[str, Any]] = []
    running = threading.Thread(
        target=lambda: replies.append(speculative.generate_one(prompts[7], "disturbed", **sampling))
    )
    running.start()
    time.sleep(1.0)
    reply = speculative.reload(other)
    assert running.is_alive(), "the reload waited for the request"
    running.join(120)
    assert replies[0]["output_ids"] == alone
    assert reply["pause_s"] < 3
    meta = speculative.samples(["disturbed"])["disturbed"].meta
    assert (meta.draft_version_start, meta.draft_version_end) == (draft_digest(draft), draft_digest(other))
    speculative.reload(stage(draft, speculative.drafts))


def test_finished_requests_are_told_with_the_draft_that_served_them(
    speculative: EngineServer, prompts: list[list[int]], target: Path, draft: Path, tmp_path: Path
) -> None:
    """Captured, denied and straddling ones; a health check is none of them."""

    def told(after: int) -> dict[str, Any]:
        return speculative.call("GET", f"/tide/requests?after={after}")

    other = stage(random_draft(target, tmp_path / "random", seed=2), speculative.drafts)
    before = told(0)["last"]
    deny = {"max_new_tokens": 12, "custom_params": {"tide": {"train": "deny", "tenant": "ann"}}}
    with speculative.client() as client:
        assert client.get("/health_generate").status_code == 200
    replies = speculative.generate(prompts[:2], [{"max_new_tokens": 12}, deny], ["told_a", "told_b"])
    running = threading.Thread(
        target=lambda: speculative.generate_one(prompts[7], "told_c", max_new_tokens=90, ignore_eos=True)
    )
    running.start()
    time.sleep(1.0)
    speculative.reload(other)
    running.join(120)
    speculative.generate_one(prompts[6], "told_d", max_new_tokens=12)
    answer = told(before)
    found = answer["requests"]
    assert [(one["tenant"], one["straddles"]) for one in sorted(found, key=lambda one: one["number"])] in (
        [("default", False), ("ann", False), ("default", True), ("default", False)],
        [("ann", False), ("default", False), ("default", True), ("default", False)],
    )
    by_tenant = {one["tenant"]: one for one in found[:2]}
    for tenant, reply in zip(("default", "ann"), replies, strict=True):
        meta, one = reply["meta_info"], by_tenant[tenant]
        assert one["tokens"] == meta["completion_tokens"] and one["prompt_tokens"] == meta["prompt_tokens"]
        assert (one["rounds"], one["accepted"]) == (meta["spec_verify_ct"], meta["spec_num_correct_drafts"])
        assert one["token_ms"] > 0 and one["draft"] == draft_digest(draft)
    assert found[3]["draft"] == answer["draft"] == draft_digest(other)
    assert answer["missed"] == 0 and not answer["restarted"] and set(answer["rounds_by_batch"]) == {"1"}
    speculative.reload(stage(draft, speculative.drafts))


def test_the_model_path_stays_the_targets(speculative: EngineServer, target: Path) -> None:
    info = speculative.call("GET", "/model_info")
    assert Path(info["model_path"]) == target.resolve()


def test_bad_drafts_are_refused_by_name(
    speculative: EngineServer, draft: Path, target: Path, tmp_path: Path
) -> None:
    before = speculative.status(checksums=True)
    staged = stage(draft, speculative.drafts)

    def refused(folder: Path, digest: str | None = None) -> str:
        body = {"path": str(folder), "digest": digest or draft_digest(folder)}
        with speculative.client() as client:
            reply = client.post("/tide/reload_draft", json=body)
        assert reply.status_code == 400, reply.text
        return reply.json()["error"]

    assert "from below" in refused(draft)
    assert "from below" in refused(speculative.drafts / "..", "x")
    assert "digest" in refused(staged, "0" * 16)
    for name, change in {
        "missing": lambda tensors: tensors.pop("midlayer.mlp.up_proj.weight"),
        "shape": lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :10].contiguous()}),
        "map": lambda tensors: tensors.update({"d2t": tensors["d2t"] + 49151}),
    }.items():
        folder = speculative.drafts / f"bad-{name}"
        shutil.copytree(draft, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        expected = {"missing": "up_proj", "shape": "fc.weight has shape", "map": "outside"}[name]
        assert expected in refused(folder)
    after = speculative.status(checksums=True)
    assert after == before


def test_the_target_cannot_be_updated(speculative: EngineServer, draft: Path) -> None:
    before = speculative.status(checksums=True)
    with speculative.client() as client:
        reply = client.post("/update_weights_from_disk", json={"model_path": str(draft)})
        direct = client.post("/set_internal_state", json={"server_args": {"tide": {"op": "reload"}}})
    assert reply.status_code == 400 and "tide/reload_draft" in reply.text
    assert direct.status_code >= 400
    assert speculative.status(checksums=True) == before


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/tide/status", None),
        ("GET", "/tide/requests", None),
        ("POST", "/tide/capture", {"enabled": False}),
        ("POST", "/tide/reload_draft", {"path": "/", "digest": "x"}),
        ("POST", "/update_weights_from_disk", {"model_path": "/"}),
    ],
)
@pytest.mark.parametrize("header", [None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ключ"])
def test_without_the_key_nothing(
    speculative: EngineServer, method: str, path: str, body: Any, header: str | None
) -> None:
    with speculative.client() as client:
        client.headers.pop("Authorization")
        headers = {"Authorization": header.encode()} if header else {}
        assert client.request(method, path, json=body, headers=headers).status_code == 401
    assert speculative.status()["capture"]["enabled"]


def test_the_key_is_seen_nowhere(speculative: EngineServer) -> None:
    with speculative.client() as client:
        client.headers.pop("Authorization")
        assert KEY not in client.get("/server_info").text
    assert all(KEY not in " ".join(process.cmdline()) for process in speculative.members if alive(process))
    assert KEY not in speculative.log.read_text(errors="replace")


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
