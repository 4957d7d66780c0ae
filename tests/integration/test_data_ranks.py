"""A real SGLang with two data-parallel ranks on the CPU: each captures its requests, users see one server."""

import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from engine_server import EngineServer, stage, start_server

from tide_platform.capture.folder import RING_FILE
from tide_platform.capture.ring import rank_path
from tide_platform.config import draft_digest

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
from tiny import AUX_LAYERS, TINY, bf16_values, tiny_draft

pytestmark = pytest.mark.integration
RANKS = (0, 1)
TOKENS = 24
TEXT = (TINY.parent / "tiny_prompts.txt").read_text()
PROMPTS = [[*TEXT[40 * number : 40 * number + 30].encode()] for number in range(8)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("ranks")
    serving = {"context_length": 256, "max_total_tokens": 2048, "radix_cache": False, "dp_size": len(RANKS)}
    draft = tiny_draft(folder / "first", 0)
    capture = {"ring_bytes": 16 << 20, "bytes_per_second": 1 << 30}
    started = start_server(folder, TINY, draft, [], AUX_LAYERS, capture, **serving)
    yield started
    started.end()


def ask(server: EngineServer, prompt: list[int], rid: str, rank: int) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "rid": rid, "routed_dp_rank": rank}
    said: list[int] = server.call("POST", "/generate", body)["output_ids"]
    return said


def ask_all(server: EngineServer, tag: str) -> dict[str, list[int]]:
    """Every prompt on every rank, together; tokens by request id."""
    rids = {f"{tag}-{number}-{rank}": (number, rank) for number in range(len(PROMPTS)) for rank in RANKS}
    with ThreadPoolExecutor(len(rids)) as pool:
        said = pool.map(lambda rid: ask(server, PROMPTS[rids[rid][0]], rid, rids[rid][1]), rids)
        return dict(zip(rids, said, strict=True))


def settled(server: EngineServer) -> dict[str, Any]:
    """The status once no request is open."""
    end = time.monotonic() + 20
    while (status := server.status())["capture"]["open"]:
        assert time.monotonic() < end, status
        time.sleep(0.1)
    return status


def test_each_rank_captures_its_own_requests(server: EngineServer) -> None:
    before = settled(server)
    said = ask_all(server, "capture")
    for number in range(len(PROMPTS)):
        assert said[f"capture-{number}-0"] == said[f"capture-{number}-1"]
    samples = server.samples(list(said))
    for rid, tokens in said.items():
        sample = samples[rid]
        assert sample.tensors["input_ids"].tolist() == PROMPTS[int(rid.split("-")[1])] + tokens
        assert (np.diff(sample.tensors["row_pos"]) == 1).all()
        assert sample.meta.draft_version_end == before["draft_digest"]
    for number in range(len(PROMPTS)):
        left, right = (bf16_values(samples[f"capture-{number}-{rank}"].tensors["aux"]) for rank in RANKS)
        # a sum goes another way in a batch of another size: the last place of bf16
        np.testing.assert_allclose(left, right, rtol=2**-6, atol=2**-6)
    status = settled(server)
    assert status["capture"]["samples"] - before["capture"]["samples"] == len(said)
    assert status["capture"]["live"] and status["capture"]["dropped"] == {}
    assert [rank["dp_rank"] for rank in status["dp_ranks"]] == list(RANKS)
    assert len({rank["scheduler_pid"] for rank in status["dp_ranks"]}) == len(RANKS)
    ring = server.settings.spool_folder / RING_FILE
    assert all(rank_path(ring, rank).exists() for rank in RANKS)


def test_finished_requests_have_one_numbering(server: EngineServer) -> None:
    last = server.call("GET", "/tide/requests?after=0")["last"]
    said = ask_all(server, "count")
    told = server.call("GET", f"/tide/requests?after={last}")
    numbers = [one["number"] for one in told["requests"]]
    assert numbers == list(range(last + 1, last + 1 + len(said))) and told["missed"] == 0
    assert all(one["tokens"] == TOKENS for one in told["requests"])
    ends = [one["at"] for one in told["requests"]]
    assert ends == sorted(ends)
    again = server.call("GET", f"/tide/requests?after={numbers[3]}")
    assert again["requests"] == told["requests"][4:]
    assert "0" not in told["rounds_by_batch"] and told["rounds_by_batch"]


def test_capture_is_switched_on_every_rank(server: EngineServer) -> None:
    before = settled(server)["capture"]["samples"]
    assert server.call("POST", "/tide/capture", {"enabled": False})["enabled"] is False
    ask_all(server, "off")
    assert settled(server)["capture"]["samples"] == before
    assert server.call("POST", "/tide/capture", {"enabled": True})["enabled"] is True


def test_a_draft_is_reloaded_on_every_rank(server: EngineServer) -> None:
    said = ask_all(server, "before")
    second = stage(tiny_draft(server.folder / "second", 1), server.drafts)
    done = server.reload(second)
    assert done["ok"] and len(done["ranks"]) == len(RANKS) and len(set(done["ranks"])) == 1
    status = server.status(checksums=True)
    assert {rank["draft_digest"] for rank in status["dp_ranks"]} == {draft_digest(second)}
    assert status["draft_digest"] == draft_digest(second) and status["weights_checksum"] == done["ranks"][0]
    after = ask_all(server, "after")
    assert [*after.values()] == [*said.values()]
    samples = server.samples(list(after))
    assert {sample.meta.draft_version_end for sample in samples.values()} == {draft_digest(second)}


def test_where_one_rank_cannot_load_no_rank_serves_the_draft(server: EngineServer) -> None:
    before = server.status(checksums=True)
    third = stage(tiny_draft(server.folder / "third", 2), server.drafts)
    scheduler = psutil.Process(before["dp_ranks"][1]["scheduler_pid"])
    limit = scheduler.rlimit(resource.RLIMIT_NOFILE)
    scheduler.rlimit(resource.RLIMIT_NOFILE, (3, limit[1]))  # it opens no file any more
    try:
        with httpx.Client(base_url=server.url, timeout=60, headers=server.client().headers) as client:
            body = {"path": str(third), "digest": draft_digest(third)}
            refused = client.post("/tide/reload_draft", json=body)
    finally:
        scheduler.rlimit(resource.RLIMIT_NOFILE, limit)
    assert refused.status_code == 400 and refused.json()["type"] == "ReloadFailed", refused.text
    assert "rank 1" in refused.json()["error"] and "still served" in refused.json()["error"]
    after = server.status(checksums=True)
    for name in ("draft_digest", "weights_checksum", "target_checksum", "reloads", "dp_ranks"):
        assert after[name] == before[name], name
    said = ask_all(server, "undone")
    assert {s.meta.draft_version_end for s in server.samples(list(said)).values()} == {before["draft_digest"]}
    assert server.reload(third)["ok"]


def test_metrics_are_of_all_ranks(server: EngineServer) -> None:
    samples = settled(server)["capture"]["samples"]
    end = time.monotonic() + 10
    while True:
        with server.client() as client:
            text = client.get("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tide_capture_"))
        counted = [float(value) for name, value in values.items() if name.startswith("tide_capture_samples")]
        if counted[:1] == [samples]:
            break
        assert time.monotonic() < end, (samples, values)
        time.sleep(0.5)
    assert float(values["tide_capture_enabled"]) == 1
    assert float(values["tide_capture_ring_bytes"]) == 16 << 20
