"""A draft from a file: answered by the target through a real server, or by one pass over the file's own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from tests.free_ports import free_port
from tide_platform.capture.record import Sample
from tide_platform.config import Settings, load_settings
from tide_platform.serving.admin import read_admin_key
from tide_platform.serving.client import SglangClient
from tide_platform.serving.drafts import stage_draft
from tide_platform.serving.launch import base_url
from tide_platform.serving.processes import end_tree, tail, tree
from tide_platform.store.hidden_states import open_store

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny_target"
TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
CONVERSATIONS, OF_TWO_TURNS = 64, 8
NEW_TOKENS = 40
READY_S = 300


class Deployment:
    """A configuration of the tiny target in ``folder``, and ``tide`` commands under it."""

    def __init__(self, folder: Path):
        from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft

        self.folder = folder
        save_draft(
            folder / "first", new_draft(load_target_parts(TINY), np.arange(128)), {"made": "for a test"}
        )
        self.config = folder / "tide.yaml"
        self.config.write_text(yaml.safe_dump(configuration(folder)))
        self.settings: Settings = load_settings(self.config, {})

    def environment(self) -> dict[str, str]:
        plain = {key: value for key, value in os.environ.items() if not key.startswith("TIDE_")}
        return plain | {"TIDE_CONFIG": str(self.config), "OMP_NUM_THREADS": "1"}

    def tide(self, *words: str) -> str:
        """Its stdout. Raises AssertionError with all that it said where it fails."""
        done = subprocess.run(
            [*TIDE, *words], cwd=ROOT, env=self.environment(), capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"tide {' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def samples(self, tenant: str) -> list[Sample]:
        store = open_store(self.settings)
        return list(store.load(store.refs(where=f"tenant = '{tenant}'")))

    def pretrain(self, tenant: str, out: Path) -> dict[str, Any]:
        """The figures of a draft from this tenant's samples."""
        self.tide(
            "draft", "pretrain", "--target", str(TINY), "--out", str(out), "--tenant", tenant,
            "--vocab-size", "128", "--epochs-k1", "2", "--epochs", "6", "--batch-size", "4",
            "--lr-k1", "3e-3", "--lr", "2e-3",
        )  # fmt: skip
        return json.loads(out.with_name(out.name + ".figures.json").read_text())


def configuration(folder: Path) -> dict[str, object]:
    return {
        "target": str(TINY),
        "draft": str(folder / "first"),
        "state": str(folder / "state"),
        "serving": {
            "port": free_port(),
            "threads": 1,
            "context_length": 256,
            "max_total_tokens": 2048,
            "dtype": "float32",
        },
        "capture": {
            "ring_bytes": 16 << 20,
            "segment_bytes": 1 << 20,
            "segment_seconds": 0.5,
            "aux_format": "bf16",  # compared with a reference
        },
        "training": {"threads": 1},
        "storage": {"uri": str(folder / "store")},
    }


def own_texts(count: int, length: int, seed: int) -> list[str]:
    from tiny import prompts

    return [bytes(row).decode() for row in prompts(count, length, seed).tolist()]


def write_conversations(path: Path, count: int, answer: int) -> Path:
    """ShareGPT; the text that the target was trained on, cut into questions and answers.

    Of this seed the target answers every prompt with more than line breaks.
    """
    records = []
    for number, text in enumerate(own_texts(count, 24 + answer, seed=6)):
        parts = [text[:24], text[24:]] + (["More.", "and more"] if number < OF_TWO_TURNS else [])
        turns = [{"from": ("human", "gpt")[i % 2], "value": part} for i, part in enumerate(parts)]
        records.append(json.dumps({"conversations": turns}))
    path.write_text("\n".join([*records[:9], "{ poisoned", *records[9:]]) + "\n")
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """With its server, and the answers of that server to a file."""
    deployment = Deployment(tmp_path_factory.mktemp("served"))
    log = deployment.folder / "serve.log"
    with log.open("wb") as file:
        serve = subprocess.Popen(
            [*TIDE, "serve"], cwd=ROOT, env=deployment.environment(), stdout=file, stderr=subprocess.STDOUT
        )
    members: list[psutil.Process] = []
    try:
        until = time.monotonic() + READY_S
        while "ready at" not in log.read_text():
            assert serve.poll() is None and time.monotonic() < until, tail(log, 60)
            time.sleep(0.5)
        members = tree(serve.pid)
        yield deployment
    finally:
        end_tree(serve, members or tree(serve.pid), 30)


@pytest.fixture(scope="module")
def regenerated(served: Deployment) -> Path:
    """The file with the target's answers, their samples in the dataset as tenant `file`."""
    source = write_conversations(served.folder / "conversations.jsonl", CONVERSATIONS, 30)
    out = served.folder / "answers.jsonl"
    said = served.tide(
        "data", "regenerate", str(source), "--out", str(out), "--tenant", "file",
        "--max-new-tokens", str(NEW_TOKENS), "--concurrency", "4",
    )  # fmt: skip
    assert f"{CONVERSATIONS + 1} records = {CONVERSATIONS} regenerated + 0 errors + 1 skipped" in said
    wait_for_samples(served, CONVERSATIONS + OF_TWO_TURNS)
    return out


def wait_for_samples(served: Deployment, count: int) -> None:
    until = time.monotonic() + 60
    while len(samples := served.samples("file")) < count:
        assert time.monotonic() < until, f"{len(samples)} of {count} samples"
        time.sleep(0.5)
        served.tide("ingest", "--once")
    assert len(samples) == count


def test_a_second_run_sends_nothing(served: Deployment, regenerated: Path):
    before = regenerated.read_bytes()
    source = served.folder / "conversations.jsonl"
    said = served.tide(
        "data", "regenerate", str(source), "--out", str(regenerated), "--tenant", "file",
        "--max-new-tokens", str(NEW_TOKENS),
    )  # fmt: skip
    assert f"{CONVERSATIONS} answered before" in said and regenerated.read_bytes() == before


def test_features_of_the_answers_are_what_was_captured(served: Deployment, regenerated: Path):
    prepared = served.folder / "prepared.jsonl"
    served.tide("data", "prepare", str(regenerated), "--out", str(prepared))
    served.tide("data", "features", str(prepared), "--tenant", "offline")
    captured, offline = served.samples("file"), served.samples("offline")
    assert len(captured) == len(offline) == CONVERSATIONS + OF_TWO_TURNS
    for sample in captured:
        assert_same(sample, next(other for other in offline if continues(other, sample)))


def continues(offline: Sample, captured: Sample) -> bool:
    """The same prompt and answer; behind it the template's line break, which no server generates."""
    mine, theirs = offline.tensors["input_ids"], captured.tensors["input_ids"]
    same_prompt = offline.meta.prompt_tokens == captured.meta.prompt_tokens
    return same_prompt and len(mine) == len(theirs) + 1 and mine[:-1].tolist() == theirs.tolist()


def assert_same(captured: Sample, offline: Sample) -> None:
    """Every row that was captured is there; those that are not had been cached by the server."""
    from tiny import bf16_values

    ours, theirs = offline.tensors, captured.tensors
    end, first = captured.meta.num_tokens, int(theirs["row_pos"][0])
    assert set(theirs["row_pos"].tolist()) >= set(range(first, end - 1))
    assert theirs["teacher_pos"][0] == ours["teacher_pos"][0] == captured.meta.prompt_tokens
    rows, teachers = theirs["row_pos"], theirs["teacher_pos"] - ours["teacher_pos"][0]
    a, b = bf16_values(ours["aux"][rows]), bf16_values(theirs["aux"])
    error = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    assert error.max() < 8e-3, f"row {rows[error.argmax()]}"
    np.testing.assert_allclose(ours["teacher_logp"][teachers], theirs["teacher_logp"], atol=2e-2, rtol=2e-3)
    emitted = ~np.isnan(theirs["token_logp"])
    assert emitted[: end - 1 - captured.meta.prompt_tokens].all()
    np.testing.assert_allclose(
        ours["token_logp"][teachers][emitted], theirs["token_logp"][emitted], atol=2e-2, rtol=2e-3
    )
    best = theirs["teacher_logp"][:, 0] - theirs["teacher_logp"][:, 1] > 0.05  # others may change places
    assert (ours["teacher_ids"][teachers][best, 0] == theirs["teacher_ids"][best, 0]).all() and best.any()


def test_answers_by_the_target_become_a_draft_that_the_server_accepts(served: Deployment, regenerated: Path):
    draft = served.folder / "draft"
    figures = served.pretrain("file", draft)
    assert figures["held_out"]["acceptance_length"]["2"] > 1.2
    before = live_acceptance(served)
    with SglangClient(base_url(served.settings), read_admin_key(served.settings)) as client:
        client.reload_draft(*stage_draft(served.settings, draft))
    after = live_acceptance(served)
    assert after > 1.2 and after > before, (before, after)


def live_acceptance(served: Deployment) -> float:
    """Over prompts that were in no file."""
    with SglangClient(base_url(served.settings)) as client:
        done = [
            client.generate(list(f"{text}\n".encode()), NEW_TOKENS, capture=False)
            for text in own_texts(12, 24, seed=77)
        ]
    return 1 + sum(g.accepted_drafts for g in done) / sum(g.verify_rounds for g in done)


def test_a_file_becomes_a_draft_without_a_server(tmp_path: Path):
    deployment = Deployment(tmp_path)
    source = write_conversations(tmp_path / "conversations.jsonl", 96, 48)
    prepared = tmp_path / "prepared.jsonl"
    said = deployment.tide("data", "prepare", str(source), "--out", str(prepared))
    assert "96 of 97 records" in said and "rejected             1" in said
    assert "mask coverage" in said
    said = deployment.tide("data", "vocab", str(prepared), "--size", "32", "--size", "128")
    assert "32 tokens: " in said and "ids fill it up" in said
    said = deployment.tide("data", "features", str(prepared), "--tenant", "file")
    # the same text twice is one sample
    twice = 96 - len(set(own_texts(96, 24 + 48, seed=6)))
    assert f"{96 + OF_TWO_TURNS - twice} appended + {twice} known" in said
    assert " 0 appended" in deployment.tide("data", "features", str(prepared), "--tenant", "file")
    figures = deployment.pretrain("file", tmp_path / "draft")
    assert figures["held_out"]["acceptance_length"]["2"] > 1.2
