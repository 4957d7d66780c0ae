"""SGLang with ``patches/sglang/v0.5.14/spec-capture.patch``, started as a builder would, without plugins."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from engine_server import wait_for_health

from tests.free_ports import free_port
from tide_platform.config import load_settings
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.serving.interpreter import find_python
from tide_platform.serving.processes import end_tree, start_child, tail, tree

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "sglang" / "v0.5.14" / "spec-capture.patch"
TINY = ROOT / "tests" / "fixtures" / "tiny_target"
KEY = "patched-server-key"
TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree of SGLang with the patch; ``python/`` of it goes on PYTHONPATH."""
    python = find_python(load_settings(None, {}))
    where = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    installed = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    tree_of_it = tmp_path_factory.mktemp("sglang")
    shutil.copytree(installed.stdout.strip(), tree_of_it / "python" / "sglang")
    subprocess.run(["git", "apply", "-p1", str(PATCH)], cwd=tree_of_it, check=True)
    return tree_of_it / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, patched: Path) -> Iterator[dict[str, Any]]:
    """The command that ``tide serve --dry-run`` prints, with the patch's options and without the plugin."""
    folder = tmp_path_factory.mktemp("patched")
    draft = folder / "draft"
    save_draft(draft, new_draft(load_target_parts(TINY), np.arange(64, 192), seed=0), {})
    port = free_port()
    serving = {"port": port, "threads": 1, "context_length": 256, "max_total_tokens": 2048}
    raw = {"target": str(TINY), "draft": str(draft), "state": str(folder / "state"), "serving": serving}
    config = folder / "tide.yaml"
    config.write_text(yaml.safe_dump(raw | {"capture": {"ring_bytes": 16 << 20, "segment_bytes": 1 << 20}}))
    printed = subprocess.run(
        [*TIDE, "serve", "--dry-run", "--config", str(config)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    env = dict(line.split("=", 1) for line in printed if re.match(r"[A-Z_]+=", line))
    engine_config = env.pop("TIDE_ENGINE_CONFIG")
    argv = next(shlex.split(line) for line in printed if "sglang.launch_server" in line)
    argv += ["--enable-spec-capture", "--spec-capture-config", engine_config]
    env |= {"PYTHONPATH": str(patched), "SGLANG_PLUGINS": "none", "TIDE_ADMIN_KEY": KEY}
    env |= {"TIDE_ENGINE_CONFIG": ""}
    process = start_child(argv, folder / "sglang.log", env, on_parent_death=signal.SIGTERM)
    members = []
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False, headers=headers
        ) as client:
            wait_for_health(client, process, folder / "sglang.log")
            members = tree(process.pid)
            yield {"client": client, "members": members, "log": folder / "sglang.log"}
    finally:
        end_tree(process, members or tree(process.pid), 20)


def test_the_patched_server_captures(server: dict[str, Any], patched: Path) -> None:
    client: httpx.Client = server["client"]
    environment = Path(f"/proc/{server['members'][0].pid}/environ").read_bytes().decode()
    assert str(patched) in environment, "the patched tree is what runs"
    assert "Executed general plugin: tide" not in tail(server["log"], 1000)
    before = client.get("/tide/status").json()
    assert before["capture"]["live"] and not before["missing_hooks"]
    body = {"input_ids": [70, 71, 72, 73], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    assert client.post("/generate", json=body).status_code == 200
    after = client.get("/tide/status").json()["capture"]
    assert after["samples"] == before["capture"]["samples"] + 1
    assert after["rows"] >= 4 + 7


def test_capture_without_a_configuration_is_refused(patched: Path) -> None:
    python = find_python(load_settings(None, {}))
    done = subprocess.run(
        [python, "-m", "sglang.launch_server", "--enable-spec-capture", "--model-path", str(TINY)],
        env={
            **os.environ,
            "PYTHONPATH": str(patched),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TIDE_ENGINE_CONFIG": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode and "--spec-capture-config" in done.stderr
