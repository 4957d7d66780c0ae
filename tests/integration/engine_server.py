"""A real SGLang server with its spool, as the engine's integration tests use it."""

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.free_ports import free_port
from tide_platform.capture.record import Sample
from tide_platform.capture.segment import read_segment
from tide_platform.capture.spool import sealed_segments
from tide_platform.config import Settings, draft_digest
from tide_platform.engine.support import ADAPTERS
from tide_platform.serving.interpreter import find_python, probe_interpreter
from tide_platform.serving.launch import StagedDraft, plan_launch
from tide_platform.serving.processes import end_tree, start_child, tail, tree
from tide_platform.serving.target_folder import check_target

KEY = "integration-test-key"
READY_SECONDS = 300
AUX_LAYERS = (2, 15, 27)


@dataclass
class EngineServer:
    """One server: how to ask it, and what its spool wrote."""

    url: str
    folder: Path
    settings: Settings
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    members: list[psutil.Process] = field(default_factory=list)

    @property
    def drafts(self) -> Path:
        return self.settings.drafts_folder

    @property
    def log(self) -> Path:
        return self.folder / "sglang.log"

    def client(self, timeout: float = 300, source: str | None = None) -> httpx.Client:
        """``source``: the address on this machine that the server sees as its peer."""
        return httpx.Client(
            base_url=self.url,
            timeout=timeout,
            headers={"Authorization": f"Bearer {KEY}"},
            transport=httpx.HTTPTransport(local_address=source),
        )

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self.client() as client:
            reply = client.request(method, path, json=body)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}\n{tail(self.log, 40)}"
        return reply.json()

    def status(self, checksums: bool = False) -> dict[str, Any]:
        return self.call("GET", f"/tide/status?checksums={str(checksums).lower()}")

    def generate(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]] | dict[str, Any], rids: list[str]
    ) -> list[dict[str, Any]]:
        """One batch; greedy where ``sampling`` does not say."""
        many = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        many = [{"temperature": 0, **one} for one in many]
        body = {"input_ids": prompts, "sampling_params": many, "rid": rids}
        replies: Any = self.call("POST", "/generate", body)
        return replies

    def generate_one(self, prompt: list[int], rid: str, **sampling: Any) -> dict[str, Any]:
        return self.generate([prompt], sampling, [rid])[0]

    def reload(self, folder: Path, digest: str | None = None) -> dict[str, Any]:
        body = {"path": str(folder), "digest": digest or draft_digest(folder)}
        return self.call("POST", "/tide/reload_draft", body)

    def samples(self, rids: list[str], seconds: float = 20) -> dict[str, Sample]:
        """What the spool sealed of these requests; waits for all of them."""
        until = time.monotonic() + seconds
        while True:
            found = {sample.meta.request_id: sample for sample in self.sealed()}
            if set(rids) <= found.keys():
                return {rid: found[rid] for rid in rids}
            if time.monotonic() > until:
                missing = sorted(set(rids) - found.keys())
                raise AssertionError(f"not in the spool: {missing}; status {self.status()}")
            time.sleep(0.2)

    def sealed(self) -> list[Sample]:
        """All samples that the spool has sealed so far."""
        folder = self.settings.spool_folder
        return [sample for path in sealed_segments(folder) for sample in read_segment(path)[1]]

    def end(self) -> None:
        self.members = self.members + [m for child in self.children for m in tree(child.pid)]
        for child in self.children:
            end_tree(child, self.members, 20)


def start_server(
    folder: Path,
    target: Path,
    draft: Path | None,
    extra: list[str],
    aux_layers: tuple[int, ...] = AUX_LAYERS,
    capture: dict[str, Any] | None = None,
    **serving: Any,
) -> EngineServer:
    """Starts SGLang on the CPU and its spool, waits until it answers. ``draft`` is staged by its digest;
    ``capture`` and ``serving`` are settings of those sections.

    Raises AssertionError with the end of the log where the server does not come up.
    """
    settings = Settings(deployment="engine-test", target=target, state=folder / "state")
    settings.serving.port, settings.serving.k = free_port(), 2 if draft else 0
    settings.capture.ring_bytes, settings.capture.segment_bytes = 64 << 20, 8 << 20
    settings.capture.segment_seconds = 0.5
    settings.capture.aux_format = "bf16"  # what the spool writes is compared with a reference
    for name, value in ({"dtype": "float32", "threads": 1} | serving).items():
        setattr(settings.serving, name, value)
    for name, value in (capture or {}).items():
        setattr(settings.capture, name, value)
    staged = None
    if draft is not None:
        staged = StagedDraft(stage(draft, settings.drafts_folder), draft_digest(draft), aux_layers)
    interpreter = probe_interpreter(find_python(settings), list(ADAPTERS))
    plan = plan_launch(settings, check_target(target), staged, interpreter)
    plan.engine_config_path.parent.mkdir(parents=True, exist_ok=True)
    plan.engine_config_path.write_text(plan.engine.model_dump_json())
    server = EngineServer(plan.base_url, folder, settings)
    env = plan.env | {"TIDE_ADMIN_KEY": KEY}
    argv = [*plan.argv, *extra]
    server.children.append(start_child(argv, server.log, env, on_parent_death=signal.SIGTERM))
    if plan.spool_argv:
        spool = [sys.executable, *plan.spool_argv]
        log = folder / "spool.log"
        server.children.append(start_child(spool, log, plan.env, on_parent_death=signal.SIGTERM))
    try:
        _wait_ready(server)
    except BaseException:
        server.end()
        raise
    server.members = [m for child in server.children for m in tree(child.pid)]
    return server


def stage(draft: Path, root: Path) -> Path:
    """Copies a draft below the only folder that the server loads from."""
    folder = root / draft_digest(draft)
    if not folder.exists():
        shutil.copytree(draft, folder)
    return folder


def _wait_ready(server: EngineServer) -> None:
    with server.client(timeout=10) as client:
        wait_for_health(client, server.children[0], server.log)


def wait_for_health(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises AssertionError with the end of the log where the server ends first, or is too slow."""
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if client.get("/health", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"SGLang did not come up:\n{tail(log, 60)}")
