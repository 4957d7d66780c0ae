"""Client and traffic against a small HTTP server that answers as SGLang does."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tide_platform.serving.client import GenerateRequest, ServerRefused, ServerUnreachable, SglangClient
from tide_platform.serving.traffic import TrafficFailed, send


class FakeSglang(ThreadingHTTPServer):
    """Remembers what it was asked; a prompt whose first id is 0 is refused."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.running, self.most = [], 0, 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeSglang
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/tide/status" and self.headers.get("Authorization") != "Bearer key":
            self._answer(401, {"error": "Unauthorized"})
        else:
            self._answer(200, {"adapter": "0.5.14"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        time.sleep(0.02)
        with self.server.lock:
            self.server.running -= 1
        if body["input_ids"][0] == 0:
            self._answer(400, {"error": {"message": "too long"}})
            return
        meta = {"id": "r", "prompt_tokens": 1, "completion_tokens": 3, "finish_reason": {"type": "length"}}
        meta |= {"spec_verify_ct": 1, "spec_num_correct_drafts": 1, "spec_correct_drafts_histogram": [0, 1]}
        self._answer(200, {"text": "", "output_ids": [1, 2, 3], "meta_info": meta})

    def _answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = FakeSglang()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server, firsts, concurrency=3, **options):
    requests = [GenerateRequest([first], 3, **options) for first in firsts]
    return asyncio.run(send(server.url, requests, concurrency))


def test_all_are_sent_a_bounded_number_at_a_time(server):
    report = ask(server, range(1, 13))
    assert report.requests == 12 and report.completion_tokens == 36 and not report.errors
    assert 1 < server.most <= 3
    assert report.acceptance_length == 2.0 and report.latency_p50_s > 0.01


def test_what_is_asked(server):
    ask(server, [7], capture=False, tenant="acme", temperature=0.5)
    tide = {"train": "deny", "tenant": "acme"}
    sampling = {"temperature": 0.5, "max_new_tokens": 3, "custom_params": {"tide": tide}}
    assert server.bodies == [{"input_ids": [7], "sampling_params": sampling}]


def test_a_refused_request_is_reported_and_the_rest_go_on(server):
    report = ask(server, [1, 0, 2, 3])
    assert report.requests == 3
    assert report.errors == ["/generate: the server answered 400: too long"]


def test_nothing_but_errors_ends_it(server):
    with pytest.raises(TrafficFailed, match="too long"):
        ask(server, [0] * 50)
    assert len(server.bodies) < 20


def test_progress_sees_every_answer(server):
    seen = []
    asyncio.run(send(server.url, [GenerateRequest([1], 3)] * 4, 2, seen.append))
    assert len(seen) == 4


def test_client(server):
    with SglangClient(server.url, "key") as client:
        assert client.healthy() and client.status()["adapter"] == "0.5.14"
        assert client.generate([1], 3, rid="mine").accepted_drafts == 1
        assert server.bodies[-1]["rid"] == "mine"
    with SglangClient(server.url, "wrong") as client, pytest.raises(ServerRefused, match="401: Unauthorized"):
        client.status()


def test_nobody_there(server):
    url = server.url
    server.shutdown()
    server.server_close()
    with SglangClient(url) as client:
        assert not client.healthy()
        with pytest.raises(ServerUnreachable, match="tide serve"):
            client.status()
