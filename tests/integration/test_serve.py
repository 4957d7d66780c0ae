"""``tide serve`` and ``tide traffic`` with a real SGLang, on the tiny target."""

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
from tide_platform.capture.spool import sealed_segments
from tide_platform.config import load_settings
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.serving.admin import admin_key_file, read_admin_key
from tide_platform.serving.client import SglangClient
from tide_platform.serving.launch import base_url
from tide_platform.serving.processes import tree

pytestmark = pytest.mark.integration

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_target"
TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
READY_S = 300


class Serve:
    """``tide serve`` as a user runs it."""

    def __init__(
        self,
        folder: Path,
        draft: Path,
        *options: str,
        env: dict[str, str] | None = None,
        more: dict[str, Any] | None = None,
    ):
        port = free_port()
        raw = {
            "target": str(TINY),
            "draft": str(draft),
            "state": str(folder / "state"),
            "serving": {"port": port, "threads": 1, "context_length": 256, "max_total_tokens": 2048},
            "capture": {"ring_bytes": 16 << 20, "segment_bytes": 1 << 20, "segment_seconds": 0.2},
        } | (more or {})
        self.config = folder / "tide.yaml"
        self.config.write_text(yaml.safe_dump(raw))
        self.settings = load_settings(self.config, {})
        self.output = folder / "serve.out"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*TIDE, "serve", "--config", self.config, *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        self.members: list[psutil.Process] = []

    def wait_ready(self) -> None:
        self.wait_for(lambda: "ready at" in self.output.read_text(), READY_S)
        self.members = tree(self.process.pid)

    def wait_for(self, condition, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.output.read_text()
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.2)

    def spool(self) -> psutil.Process:
        return next(p for p in tree(self.process.pid) if "tide_platform.capture.spool" in p.cmdline())

    def client(self) -> SglangClient:
        return SglangClient(base_url(self.settings), read_admin_key(self.settings))

    def traffic(self, *options: str) -> dict:
        command = [*TIDE, "traffic", "--config", self.config, "--json", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def assert_nothing_left(self, seconds: float = 15) -> None:
        end = time.monotonic() + seconds
        while left := [p for p in self.members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < end, left
            time.sleep(0.1)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    save_draft(folder, new_draft(load_target_parts(TINY), np.arange(64, 192), seed=0), {"made_by": "test"})
    return folder


@pytest.fixture
def serve(tmp_path, draft) -> Iterator[Serve]:
    serving = Serve(tmp_path, draft)
    serving.wait_ready()
    yield serving
    if serving.process.poll() is None:
        serving.process.terminate()
        serving.process.wait(60)
    serving.assert_nothing_left()


def test_serves_captures_survives_its_spool_and_ends_on_sigterm(serve, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    lines = [{"prompt": f"Is the sky of colour {n}?", "split": "traffic"} for n in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--workload", str(prompts), "--requests", "6", "--concurrency", "3", "--max-new-tokens", "12")

    report = serve.traffic(*options)
    assert report["requests"] == 6 and report["errors"] == []
    assert report["verify_rounds"] > 0 and report["acceptance_length"] >= 1
    serve.traffic(*options, "--uncaptured")
    with serve.client() as client:
        serve.wait_for(lambda: client.status()["capture"]["samples"] == 6)
    serve.wait_for(lambda: sealed_segments(serve.settings.spool_folder))

    serve.spool().kill()
    serve.wait_for(lambda: "restart 1" in serve.output.read_text())
    serve.traffic(*options)
    with serve.client() as client:
        status = client.status()
        assert status["capture"]["samples"] == 12 and status["draft_digest"]

    key = read_admin_key(serve.settings)
    assert admin_key_file(serve.settings).stat().st_mode & 0o077 == 0
    assert not any(key in " ".join(p.cmdline()) for p in tree(serve.process.pid))
    logs = [*(serve.settings.state / "logs").iterdir(), serve.output]
    assert not any(key in path.read_text(errors="replace") for path in logs)

    serve.members = tree(serve.process.pid)
    serve.process.terminate()
    assert serve.process.wait(60) == 0, serve.output.read_text()
    serve.assert_nothing_left()


def test_a_server_that_dies_by_itself_is_an_error(serve):
    scheduler = next(p for p in serve.members if "scheduler" in p.name() or "sglang::sched" in p.name())
    scheduler.kill()
    assert serve.process.wait(60) != 0
    assert "ended by itself" in serve.output.read_text()


def test_nothing_outlives_a_killed_serve(serve):
    serve.process.kill()
    serve.process.wait()
    serve.assert_nothing_left()


def test_a_server_without_the_plugin_is_refused(tmp_path, draft):
    serving = Serve(tmp_path, draft, "--k", "0", env={"SGLANG_PLUGINS": "none"})
    assert serving.process.wait(READY_S) == 2
    assert "error: the tide plugin is not live" in serving.output.read_text().splitlines()[-1]
    assert not tree(serving.process.pid)
