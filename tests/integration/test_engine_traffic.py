"""Traffic as a production server sees it: whose it is, what may be kept of it, what is said of it.

A real SGLang on the tiny target, whose token ids are bytes.
"""

import json
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from engine_server import KEY, EngineServer, start_server
from typer.testing import CliRunner

from tide_platform.capture.record import Sample
from tide_platform.cli.capture import command
from tide_platform.draft.prefix import fill_prefixes
from tide_platform.serving.client import SglangClient

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
from tiny import AUX_LAYERS, TINY, tiny_draft

pytestmark = pytest.mark.integration

PROXY, STRANGER = "127.0.0.2", "127.0.0.1"
TAIL, LONGEST, STRETCH = 100, 400, 200
TEXT = (TINY.parent / "tiny_prompts.txt").read_text()
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """One proxy is trusted; prompts are kept up to their last 100 tokens, samples split at 200."""
    folder = tmp_path_factory.mktemp("traffic")
    capture = {
        "trusted_proxies": [f"{PROXY}/32"],
        "prompt_tail_tokens": TAIL,
        "max_request_tokens": LONGEST,
        "max_sample_tokens": STRETCH,
        "ring_bytes": 16 << 20,
    }
    # that parser's grammar wants a token for </think>, and here a token is a byte
    extra = ["--reasoning-parser", "deepseek-r1", "--grammar-backend", "none"]
    serving = {"context_length": 512, "max_total_tokens": 4096}
    draft = tiny_draft(folder / "draft", 0)
    started = start_server(folder, TINY, draft, extra, AUX_LAYERS, capture, **serving)
    yield started
    started.end()


def ask(
    server: EngineServer,
    route: str,
    text: str,
    tide: dict[str, str] | None = None,
    headers: dict[str, str] | None = None,
    source: str = PROXY,
    tokens: int = 8,
    **more: Any,
) -> Any:
    """One greedy request; ``tide`` is the field in its body."""
    custom = {"custom_params": {"tide": tide}} if tide is not None else {}
    if route == "/generate":
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **custom}
        body: dict[str, Any] = {"text": text, "sampling_params": sampling}
    else:
        said = {"messages": [{"role": "user", "content": text}]} if "chat" in route else {"prompt": text}
        body = {"model": "tiny", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **said, **custom}
    with server.client(source=source) as client:
        reply = client.post(route, json=body | more, headers=headers or {})
    assert reply.status_code == 200, reply.text
    return reply.json()


def wait_for(found: Callable[[], Any], seconds: float = 20) -> Any:
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.1)
    return value


def samples_of(server: EngineServer, tenant: str, count: int = 1) -> list[Sample]:
    def found() -> list[Sample] | None:
        samples = [s for s in server.sealed() if s.meta.tenant == tenant]
        return samples if len(samples) >= count else None

    samples = wait_for(found)
    assert len(samples) == count
    return samples


def grown(server: EngineServer, kind: str, before: dict[str, Any]) -> dict[str, int]:
    now = server.status()["capture"][kind]
    return {name: n - before[kind].get(name, 0) for name, n in now.items() if n > before[kind].get(name, 0)}


@pytest.mark.parametrize("route", ROUTES)
def test_headers_of_a_trusted_proxy_reach_the_sample(server: EngineServer, route: str) -> None:
    tenant = f"header{route.replace('/', '-')}"
    before = server.status()["capture"]
    ask(server, route, "Return the", headers={"X-TIDE-Tenant": tenant, "X-TIDE-Train": "allow"})
    ask(server, route, "Return the", headers={"X-TIDE-Tenant": tenant, "X-TIDE-Train": "deny"})
    (sample,) = samples_of(server, tenant)
    assert sample.meta.prompt_tokens >= len("Return the")
    assert grown(server, "skipped", before) == {"opt_out": 1} and grown(server, "ignored", before) == {}


@pytest.mark.parametrize("route", ROUTES)
def test_the_bodys_field_counts_where_the_proxy_says_nothing(server: EngineServer, route: str) -> None:
    tenant = f"field{route.replace('/', '-')}"
    before = server.status()["capture"]
    ask(server, route, "Return the", tide={"tenant": tenant})
    ask(server, route, "Return the", tide={"tenant": tenant, "train": "deny"})
    ask(server, route, "Return the", tide={"tenant": tenant}, headers={"X-TIDE-Tenant": "header-wins"})
    samples_of(server, tenant)
    samples_of(server, "header-wins", count=ROUTES.index(route) + 1)
    assert grown(server, "skipped", before) == {"opt_out": 1}


@pytest.mark.parametrize("route", ROUTES)
def test_a_stranger_can_only_deny(server: EngineServer, route: str) -> None:
    before = server.status()["capture"]
    claims = {"X-TIDE-Tenant": f"stolen{route.replace('/', '-')}"}
    # SGLang's HTTP server would take this header for the peer's address
    forwarded = {"X-Forwarded-For": PROXY, "X-Forwarded-Proto": "http"}
    ask(server, route, "Return the", headers=claims | forwarded, source=STRANGER)
    ask(server, route, "Return the", headers={"X-TIDE-Train": "deny"}, source=STRANGER)
    ask(server, route, "Return the", headers={"X-TIDE-Train": "maybe"}, source=STRANGER)
    wait_for(lambda: server.status()["capture"]["samples"] == before["samples"] + 1)
    assert grown(server, "skipped", before) == {"opt_out": 2}
    assert grown(server, "ignored", before) == {"untrusted": 1, "malformed": 1}
    assert all(not s.meta.tenant.startswith("stolen") for s in server.sealed())


def test_a_denied_request_leaves_no_byte(server: EngineServer, tmp_path: Path) -> None:
    """Neither its tokens nor its id, in ring, spool or store; an allowed request's are in all three."""
    from tide_platform.ingest.service import Ingest
    from tide_platform.store.hidden_states import open_store

    allowed, denied = "#ALLOWED|{~}|%d", "#DENIED_|{~}|%d"
    for number, route in enumerate(ROUTES):
        for text, word in ((allowed, "allow"), (denied, "deny")):
            rid = {"rid": f"{word}-{number}-7c1f"}
            for way in ({"headers": {"X-TIDE-Train": word}}, {"tide": {"train": word}}):
                more = rid | ({"rid": f"{rid['rid']}-body"} if "tide" in way else {})
                ask(server, route, text % number, **way, **more)
    # a stranger's word is enough, and so is one of two
    ask(server, "/generate", denied % 8, headers={"X-TIDE-Train": "deny"}, source=STRANGER, rid="deny-8-7c1f")
    ask(server, "/generate", denied % 9, tide={"train": "deny"}, headers={"X-TIDE-Train": "allow"})
    wait_for(lambda: sum(s.meta.request_id.startswith("allow-") for s in server.sealed()) == 6)

    def bytes_below(folder: Path) -> bytes:
        return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())

    def occurrences(data: bytes, marker: str, rid: str) -> tuple[int, int]:
        tokens = np.frombuffer(marker.split("%")[0].encode(), np.uint8).astype(np.int32).tobytes()
        return data.count(tokens), data.count(rid.encode())

    spool = server.settings.spool_folder
    ring = (spool / "server.ring").read_bytes()
    segments = b"".join(path.read_bytes() for path in spool.glob("*.seg"))
    server.settings.storage.uri = str(tmp_path / "store")
    Ingest(server.settings).run(once=True)
    for data in (ring, segments):
        assert min(occurrences(data, allowed, "allow-")) >= 6
    for data in (ring, segments, bytes_below(server.settings.state), bytes_below(tmp_path / "store")):
        assert occurrences(data, denied, "deny-") == (0, 0)
    store = open_store(server.settings)
    stored = list(store.load([ref.sample_id for ref in store.refs()]))
    texts = [bytes(s.tensors["input_ids"].astype(np.uint8)) for s in stored]
    assert sum(text.startswith(b"#ALLOWED|") for text in texts) == 6
    assert not any(b"#DENIED_|" in text for text in texts)
    assert not any(s.meta.request_id.startswith("deny-") for s in stored)


def test_what_is_kept_is_its_owners_alone(server: EngineServer) -> None:
    ask(server, "/generate", "Return the", headers={"X-TIDE-Tenant": "modes"})
    samples_of(server, "modes")
    spool = server.settings.spool_folder
    holding = [path for path in spool.rglob("*") if path.suffix not in (".lock", ".json")]
    assert {path.suffix for path in holding} >= {".ring", ".seg"}
    for path in (spool, *holding):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_rules_change_while_the_server_runs(server: EngineServer, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TIDE_ADMIN_KEY", KEY)
    config = tmp_path / "tide.yaml"
    config.write_text(json.dumps({"state": str(tmp_path / "state"), "target": str(TINY)}))
    before = server.status()["capture"]
    steps: list[tuple[list[str], dict[str, str]]] = [
        (["--default", "deny"], {}),
        (["--default", "allow", "--deny-tenant", "acme"], {"X-TIDE-Tenant": "acme"}),
        (["--undeny-tenant", "acme", "--only-tenant", "other"], {"X-TIDE-Tenant": "acme"}),
        (["--all-tenants", "--sampling-rate", "0"], {}),
        (["--sampling-rate", "1", "--bytes-per-second", "0"], {}),
        (["--bytes-per-second", "-1", "off"], {}),
        (["on"], {"X-TIDE-Tenant": "rules"}),
    ]
    app = typer.Typer()
    app.command()(command)
    for options, headers in steps:
        given = [*options, "--url", server.url, "--config", str(config), "--json"]
        done = CliRunner().invoke(app, given, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        ask(server, "/generate", "Return the", headers=headers)
    samples_of(server, "rules")
    expected = {"opt_out": 1, "tenant": 2, "sampled_out": 1, "budget": 1, "disabled": 1}
    assert grown(server, "skipped", before) == expected
    with SglangClient(server.url, KEY) as client:
        state = client.capture(bytes_per_second=1 << 30)
        assert (state["enabled"], state["bytes_per_second"]) == (True, 1 << 30)
        assert client.capture(bytes_per_second=None)["bytes_per_second"] is None


def test_a_long_prompt_keeps_its_tail_and_leaves_in_stretches(server: EngineServer) -> None:
    text = TEXT[:200]
    reply = ask(server, "/generate", text, headers={"X-TIDE-Tenant": "long"}, tokens=180, rid="long")
    samples = sorted(samples_of(server, "long", count=2), key=lambda s: s.meta.start_pos)
    first, last = (s.meta for s in samples)
    assert (first.start_pos, first.num_tokens, first.prompt_tokens) == (200 - TAIL, STRETCH, 200)
    assert last.start_pos == 200 - TAIL + STRETCH and last.num_tokens == 380 - last.start_pos
    assert "stretch" in first.flags and "truncated_context" in first.flags
    assert (first.verify_rounds, first.finish_reason) == (0, "continues")
    assert last.verify_rounds == reply["meta_info"]["spec_verify_ct"] and last.finish_reason == "length"
    ids = np.concatenate([s.tensors["input_ids"] for s in samples])
    assert ids.tolist() == [*text.encode()][200 - TAIL :] + reply["output_ids"]
    rows = np.concatenate([s.tensors["row_pos"] for s in samples])
    assert rows[0] == 200 - TAIL and (np.diff(rows) == 1).all()


def test_requests_that_are_too_long_are_not_kept(server: EngineServer) -> None:
    before = server.status()["capture"]
    text = TEXT[-LONGEST - 1 :]
    ask(server, "/generate", text, headers={"X-TIDE-Tenant": "too-long"})
    ask(server, "/generate", text[: LONGEST - 150], headers={"X-TIDE-Tenant": "grows"}, tokens=200)
    assert grown(server, "skipped", before) == {"too_long": 2}
    assert server.status()["capture"]["open"] == 0
    grew = [s.meta for s in server.sealed() if s.meta.tenant == "grows"]
    assert all(meta.finish_reason == "continues" for meta in grew)


def test_chats_with_tools_and_thinking_are_flagged(server: EngineServer) -> None:
    tool = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
    chat = "/v1/chat/completions"
    ask(server, chat, "Return the", headers={"X-TIDE-Tenant": "tools"}, tools=[tool])
    ask(server, "/generate", "Return the", headers={"X-TIDE-Tenant": "plain"})
    (tools,), (plain,) = samples_of(server, "tools"), samples_of(server, "plain")
    assert {"tool_calls", "thinking"} <= set(tools.meta.flags)
    assert not {"tool_calls", "thinking"} & set(plain.meta.flags)


def test_parallel_samples_share_a_prompt_that_is_computed_once(server: EngineServer) -> None:
    before = server.status()["capture"]
    text = "Create a new object from 3 given ones"
    ask(server, "/v1/completions", text, headers={"X-TIDE-Tenant": "three"}, n=3, tokens=9)
    for sample in samples_of(server, "three", count=3):
        ids = sample.tensors["input_ids"]
        assert bytes(ids[: len(text)].astype(np.uint8)).decode() == text and len(ids) == len(text) + 9
        assert "truncated_context" in sample.meta.flags and sample.meta.verify_rounds > 0
    assert grown(server, "skipped", before) == {"no_response": 1}  # SGLang's own, which fills its cache


def test_a_stream_that_the_client_leaves_is_an_aborted_sample(server: EngineServer) -> None:
    body = {
        "text": "Return the list of",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 370, "ignore_eos": True},
    }
    headers = {"X-TIDE-Tenant": "left"}
    with (
        server.client(source=PROXY) as client,
        client.stream("POST", "/generate", json=body, headers=headers) as s,
    ):
        chunks = s.iter_lines()
        seen = [next(chunks) for _ in range(6)]
        # SGLang aborts two seconds after a client has left: a fast machine would be done by then
        with server.client() as other:
            other.post("/pause_generation", json={"mode": "in_place"}).raise_for_status()
    assert seen
    time.sleep(3)
    with server.client() as client:
        client.post("/continue_generation", json={}).raise_for_status()
    samples = wait_for(
        lambda: [s for s in server.sealed() if s.meta.tenant == "left" and s.meta.verify_rounds]
    )
    assert "aborted" in samples[-1].meta.flags and samples[-1].meta.finish_reason == "abort"
    assert server.status()["capture"]["open"] == 0


def test_turns_of_a_conversation(server: EngineServer) -> None:
    """The second turn finds the first in the cache; its hole is filled from the first turn's sample."""
    named = {"X-TIDE-Tenant": "turns", "X-TIDE-Conversation": "c-1"}
    first = "Is this a question of some length?"
    reply = ask(server, "/generate", first, headers=named, rid="turn-1", tokens=20)
    second = first + reply["text"] + "\nAnd this one?"
    ask(server, "/generate", second, headers=named, rid="turn-2", tokens=20)
    found = server.samples(["turn-1", "turn-2"])
    one, two = found["turn-1"], found["turn-2"]
    assert two.tensors["row_pos"][0] >= len(first) and "truncated_context" in two.meta.flags
    filled = fill_prefixes([one, two])[1]
    assert filled.tensors["row_pos"][0] == 0 and len(filled.tensors["row_pos"]) > len(two.tensors["row_pos"])


def test_a_request_that_a_reload_interrupts_is_whole(server: EngineServer, tmp_path: Path) -> None:
    drafts = [tiny_draft(server.drafts / f"other-{seed}", seed) for seed in (1, 2)]
    for attempt in range(6):  # until a reload is faster than the rest of an answer
        before, tenant = server.status()["draft_digest"], f"reloaded-{attempt}"
        asked = threading.Thread(
            target=ask,
            args=(server, "/generate", "%Reloaded between two of its rounds"),
            kwargs={"headers": {"X-TIDE-Tenant": tenant}, "tokens": 150},
        )
        asked.start()
        while not server.status()["capture"]["open"] and asked.is_alive():
            pass
        digest = server.reload(drafts[attempt % 2])["digest"]
        asked.join(60)
        (sample,) = samples_of(server, tenant)
        meta = sample.meta
        if (meta.draft_version_start, meta.draft_version_end) == (before, digest):
            break
    else:
        pytest.fail("no reload fell into an answer")
    assert meta.num_tokens == len("%Reloaded between two of its rounds") + 150 and meta.flags == ()
    assert (np.diff(sample.tensors["row_pos"]) == 1).all()


def test_counts_are_on_the_servers_own_metrics(server: EngineServer) -> None:
    def read() -> dict[str, float]:
        with server.client() as client:
            text = client.get("/metrics").text
        lines = re.findall(r"^(tide_capture_\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def settled() -> dict[str, float] | None:
        values, state = read(), server.status()["capture"]
        counts = {f"tide_capture_{name}_total": state[name] for name in ("rows", "bytes", "samples")}
        # a publication may have fallen between a request's last row and its end
        counts["tide_capture_open"] = state["open"]
        return values if counts.items() <= values.items() else None

    values, state = wait_for(settled), server.status()["capture"]
    for kind in ("dropped", "skipped", "ignored"):
        for reason, count in state[kind].items():
            assert values[f'tide_capture_{kind}_total{{reason="{reason}"}}'] == count, reason
    assert values["tide_capture_open"] == 0 and values["tide_capture_enabled"] == 1
    assert values["tide_capture_sampling_rate"] == 1
    assert values["tide_capture_ring_bytes"] == 16 << 20
    assert 0 <= values["tide_capture_ring_used_bytes"] < 16 << 20
    assert 0 <= values["tide_capture_spool_age_seconds"] < 30
    assert 0 < values["tide_capture_seconds_count"] <= state["cost"]["rounds"]
    assert values["tide_capture_seconds_sum"] == pytest.approx(state["cost"]["capture_s"], rel=0.2)


def test_nothing_is_left_open_or_lost(server: EngineServer) -> None:
    capture = server.status()["capture"]
    assert capture["live"] and capture["error"] is None
    assert (capture["open"], capture["dropped"]) == (0, {})


def test_k_may_change_between_rounds(tmp_path: Path) -> None:
    """SGLang's adaptive speculation: by batch size, so it changes as a batch shrinks."""
    steps = {"1": {"candidate_steps": [1, 3]}, "3": {"candidate_steps": [2]}, "5": {"candidate_steps": [0]}}
    config = tmp_path / "adaptive.json"
    config.write_text(json.dumps(steps))
    serving = {"context_length": 512, "max_total_tokens": 4096, "adaptive": True, "adaptive_config": config}
    draft = tiny_draft(tmp_path / "draft", 0)
    server = start_server(tmp_path, TINY, draft, [], AUX_LAYERS, {"ring_bytes": 16 << 20}, **serving)
    try:
        prompts = [[*TEXT[40 * i : 40 * i + 30].encode()] for i in range(5)]
        lengths = [{"max_new_tokens": 20 + 25 * i, "ignore_eos": True} for i in range(5)]
        rids = [f"adaptive-{i}" for i in range(5)]
        replies = {reply["meta_info"]["id"]: reply for reply in server.generate(prompts, lengths, rids)}
        samples = server.samples(rids)
        assert server.status()["capture"]["error"] is None
    finally:
        server.end()
    for rid, prompt in zip(rids, prompts, strict=True):
        meta, tensors = samples[rid].meta, samples[rid].tensors
        ids, teachers = tensors["input_ids"], tensors["teacher_pos"]
        assert ids.tolist() == prompt + replies[rid]["output_ids"]
        assert meta.verify_rounds == replies[rid]["meta_info"]["spec_verify_ct"]
        assert (np.diff(tensors["row_pos"]) == 1).all() and tensors["row_pos"][-1] >= len(ids) - 2
        said = teachers[teachers + 1 < len(ids)]
        assert ids[said + 1].tolist() == tensors["teacher_ids"][: len(said), 0].tolist()
    assert {rid for rid in rids if "adaptive_k" in samples[rid].meta.flags} >= set(rids[2:])
    assert samples[rids[-1]].meta.k == 3
