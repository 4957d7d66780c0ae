"""Answers by a server of a few lines: what is asked, what is kept, and going on where a run ended."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from chat_targets import CHATML, chat_target, conversation, write_jsonl

from tide_platform.corpus import regenerate as module
from tide_platform.corpus.errors import ForeignOutput, RegenerationFailed, ResumeMismatch, TooManyRejected
from tide_platform.corpus.regenerate import RegenerateCounts, RegeneratePlan, regenerate
from tide_platform.corpus.template import ChatTemplate


class FakeServer(ThreadingHTTPServer):
    """Answers by ``answer <n of the prompt's tokens>``; ``refuse``: text in a prompt -> statuses to give."""

    def __init__(self, target: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.template = ChatTemplate(target)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.refuse: dict[str, list[int]] = {}
        self.lock = threading.Lock()

    def prompts(self) -> list[str]:
        return [self.template.tokenizer.decode(body["input_ids"]) for body in self.bodies]


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = self.server.template.tokenizer.decode(body["input_ids"])
        with self.server.lock:
            self.server.bodies.append(body)
            status = next(
                (codes.pop(0) for text, codes in self.server.refuse.items() if text in prompt and codes), 200
            )
        if status != 200:
            self._answer(status, {"error": {"message": f"refused with {status}"}})
            return
        text = f"answer {len(body['input_ids'])}"
        ids = self.server.template.tokenizer(text)["input_ids"]
        meta = {"id": body["rid"], "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids)}
        meta |= {"finish_reason": {"type": "stop"}, "spec_verify_ct": 2, "spec_num_correct_drafts": 3}
        self._answer(200, {"text": text, "output_ids": [*ids, 0], "meta_info": meta})

    def _answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_target(tmp_path_factory.mktemp("targets") / "chatml", CHATML)


@pytest.fixture
def server(target: Path):
    server = FakeServer(target)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(server: FakeServer, target: Path, source: Path, out: Path, **changes: Any) -> RegenerateCounts:
    plan: dict[str, Any] = {
        "format": None, "turns": "all", "tenant": "file", "capture": True, "concurrency": 3,
        "temperature": 0.0, "max_new_tokens": 16, "max_rejected": 0.1,
    }  # fmt: skip
    counts = regenerate(source, out, server.url, target, RegeneratePlan(**plan | changes))
    assert counts.records == counts.regenerated + counts.errors + counts.skipped
    return counts


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_answer_is_given_the_new_ones_before_it(tmp_path: Path, server: FakeServer, target: Path):
    source = write_jsonl(tmp_path / "in.jsonl", [conversation("the dog", "old", "why", "older")])
    counts = run(server, target, source, tmp_path / "out.jsonl")
    first, second = server.prompts()
    assert first == "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    answer = f"answer {len(server.bodies[0]['input_ids'])}"
    assert second == f"{first}{answer}<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n"
    (line,) = lines(tmp_path / "out.jsonl")
    assert [m["content"] for m in line["messages"]][:3] == ["the dog", answer, "why"]
    assert counts.requests == 2 and counts.acceptance_length == 1 + 6 / 4


def test_what_is_asked_of_the_server(tmp_path: Path, server: FakeServer, target: Path):
    source = write_jsonl(tmp_path / "in.jsonl", [conversation("a", "b")])
    run(server, target, source, tmp_path / "out.jsonl", temperature=0.7, capture=False)
    (body,) = server.bodies
    name = lines(tmp_path / "out.jsonl")[0]["id"]
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "max_new_tokens": 16,
        "custom_params": {"tide": {"train": "deny", "tenant": "file", "conversation": name}},
    }
    assert body["rid"] == f"data-{name}-1"


def test_only_the_last_answer_where_that_is_asked(tmp_path: Path, server: FakeServer, target: Path):
    source = write_jsonl(tmp_path / "in.jsonl", [conversation("a", "kept", "c", "old")])
    run(server, target, source, tmp_path / "out.jsonl", turns="last")
    contents = [m["content"] for m in lines(tmp_path / "out.jsonl")[0]["messages"]]
    assert contents[1] == "kept" and contents[3].startswith("answer")
    assert len(server.bodies) == 1


def test_tokens_come_out_as_tokens(tmp_path: Path, server: FakeServer, target: Path):
    records = [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}, {"input_ids": [8, 9]}]
    run(server, target, write_jsonl(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl")
    found = sorted(lines(tmp_path / "out.jsonl"), key=lambda line: line["input_ids"])
    assert [line["input_ids"][:2] for line in found] == [[5, 6], [8, 9]]
    for line in found:
        answer = server.template.tokenizer.decode(line["input_ids"][2:])
        assert answer == "answer 2"  # without the token past the stop
        assert line["loss_mask"] == [0, 0] + [1] * (len(line["input_ids"]) - 2)


def test_calls_of_tools_stay_and_what_follows_is_answered_anew(
    tmp_path: Path, server: FakeServer, target: Path
):
    record = conversation("a", "", tools=[{"type": "function", "function": {"name": "f"}}])
    record["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {}}}]
    record["messages"] += [{"role": "tool", "content": "3"}, {"role": "assistant", "content": "old"}]
    only_calls = conversation("b", "")
    only_calls["messages"][1]["tool_calls"] = record["messages"][1]["tool_calls"]
    source = write_jsonl(tmp_path / "in.jsonl", [record, only_calls])
    counts = run(server, target, source, tmp_path / "out.jsonl")
    (line,) = lines(tmp_path / "out.jsonl")
    assert line["messages"][1]["tool_calls"] and line["messages"][3]["content"].startswith("answer")
    assert line["tools"] == record["tools"]
    assert (counts.kept_tool_calls, counts.without_answer, counts.requests) == (1, 1, 1)


def test_a_second_run_asks_nothing_again(tmp_path: Path, server: FakeServer, target: Path):
    records = [conversation(f"the {i}", "old") for i in range(12)]
    source, out = write_jsonl(tmp_path / "in.jsonl", [*records, records[3]]), tmp_path / "out.jsonl"
    counts = run(server, target, source, out)
    assert (counts.regenerated, counts.duplicates) == (12, 1)
    before, asked = out.read_bytes(), len(server.bodies)
    counts = run(server, target, source, out)
    assert (counts.known, counts.duplicates, counts.regenerated) == (12, 1, 0)
    assert out.read_bytes() == before and len(server.bodies) == asked


def test_an_interrupted_run_goes_on_behind_its_last_whole_line(
    tmp_path: Path, server: FakeServer, target: Path
):
    source = write_jsonl(tmp_path / "in.jsonl", [conversation(f"the {i}", "old") for i in range(6)])
    out = tmp_path / "out.jsonl"
    run(server, target, source, out)
    content = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(content[:3]) + content[3][:20])
    counts = run(server, target, source, out)
    assert (counts.known, counts.regenerated) == (3, 3)
    assert sorted(line["id"] for line in lines(out)) == sorted(json.loads(line)["id"] for line in content)


def test_what_fails_is_written_with_its_reason_and_tried_again(
    tmp_path: Path, server: FakeServer, target: Path
):
    records = [conversation(f"the {i} dog", "old") for i in range(8)]
    source, out = write_jsonl(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    server.refuse = {"the 5": [400]}
    counts = run(server, target, source, out)
    assert (counts.regenerated, counts.errors) == (7, 1)
    (failed,) = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert failed["record"] == 6 and "refused with 400" in failed["reason"]
    counts = run(server, target, source, out)
    assert (counts.known, counts.regenerated, counts.errors) == (7, 1, 0)
    assert not (tmp_path / "out.jsonl.errors.jsonl").exists() and len(lines(out)) == 8


def test_a_busy_server_is_asked_again(tmp_path: Path, server: FakeServer, target: Path, monkeypatch):
    monkeypatch.setattr(module, "wait_exponential_jitter", lambda **_: lambda _state: 0)
    source = write_jsonl(tmp_path / "in.jsonl", [conversation("the dog", "old")])
    server.refuse = {"the dog": [503, 429]}
    counts = run(server, target, source, tmp_path / "out.jsonl")
    assert (counts.regenerated, counts.requests, len(server.bodies)) == (1, 1, 3)


def test_a_server_that_only_fails_ends_the_run_which_can_go_on(
    tmp_path: Path, server: FakeServer, target: Path
):
    source = write_jsonl(tmp_path / "in.jsonl", [conversation(f"the {i}", "old") for i in range(50)])
    server.refuse = {"the": [500] * 50}
    with pytest.raises(RegenerationFailed, match="refused with 500"):
        run(server, target, source, tmp_path / "out.jsonl")
    assert len(server.bodies) < 20
    server.refuse = {}
    assert run(server, target, source, tmp_path / "out.jsonl").regenerated == 50


def test_other_settings_do_not_mix_into_one_file(tmp_path: Path, server: FakeServer, target: Path):
    source, out = write_jsonl(tmp_path / "in.jsonl", [conversation("a", "b")]), tmp_path / "out.jsonl"
    run(server, target, source, out)
    with pytest.raises(ResumeMismatch, match=r"temperature was 0.0, now 0.7"):
        run(server, target, source, out, temperature=0.7)


def test_a_file_that_no_run_began_is_left_alone(tmp_path: Path, server: FakeServer, target: Path):
    source = write_jsonl(tmp_path / "in.jsonl", [conversation("a", "b")])
    out = tmp_path / "precious.jsonl"
    out.write_text("mine")
    with pytest.raises(ForeignOutput):
        run(server, target, source, out)
    assert out.read_text() == "mine"


def test_poisoned_records_are_set_aside_and_bounded(tmp_path: Path, server: FakeServer, target: Path):
    records: list[Any] = [conversation(f"the {i}", "old") for i in range(9)]
    source = write_jsonl(tmp_path / "in.jsonl", [*records, "{"])
    counts = run(server, target, source, tmp_path / "out.jsonl")
    assert (counts.rejected, counts.regenerated) == (1, 9)
    assert lines(tmp_path / "out.jsonl.rejected.jsonl")[0]["record"] == 10
    with pytest.raises(TooManyRejected):
        run(server, target, write_jsonl(source, [*records, "{", "["]), tmp_path / "out.jsonl")


def test_many_conversations_in_a_row_that_are_too_long_do_not_end_the_run(
    tmp_path: Path, server: FakeServer, target: Path
):
    records = [conversation(f"the {i}", "old") for i in range(30)]
    server.refuse = {f"the {i}<": [400] for i in range(24)}
    source = write_jsonl(tmp_path / "in.jsonl", records)
    counts = run(server, target, source, tmp_path / "out.jsonl")
    assert (counts.errors, counts.regenerated) == (24, 6)
    assert len(lines(tmp_path / "out.jsonl.errors.jsonl")) == 24
