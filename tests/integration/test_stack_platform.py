"""The local stack without a model: real SeaweedFS, MLflow and Dagster, started, used, killed, ended."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tide_platform.config import Settings, load_settings
from tide_platform.local import services
from tide_platform.local.graphql import Dagster
from tide_platform.local.layout import Layout
from tide_platform.local.leftovers import find_leftovers
from tide_platform.local.ready import dagster_url
from tide_platform.local.stack import Stack, stack_states
from tide_platform.store.objects import ObjectStore

pytestmark = [pytest.mark.integration, pytest.mark.faults]

TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
# as `tide demo` does, with object storage alone: that is up in seconds
OWNER = """
import sys, time
from pathlib import Path
from tide_platform.config import load_settings
from tide_platform.local.stack import Stack
settings = load_settings()
settings.state = Path(sys.argv[1])
with Stack(settings, auto_ports=True) as stack:
    stack.open(die_with_parent=True)
    stack.start(["storage"])
    print("up", flush=True)
    time.sleep(300)
"""


def _settings(state: Path) -> Settings:
    settings = load_settings(environ={})
    settings.state = state
    return settings


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stack")


@pytest.fixture(scope="module")
def stack(state: Path) -> Iterator[Stack]:
    before = dict(os.environ)
    with Stack(_settings(state), auto_ports=True) as stack:
        stack.open(die_with_parent=True)
        stack.start(services.PLATFORM)
        yield stack
    os.environ.clear()
    os.environ.update(before)


def test_storage_asks_for_keys(stack: Stack) -> None:
    ObjectStore(stack.settings.storage).put_bytes("kept", b"value")
    endpoint = stack.settings.storage.endpoint
    assert httpx.get(f"{endpoint}/tide/kept").status_code == 403
    assert httpx.put(f"{endpoint}/tide/open", content=b"x").status_code == 403


def test_the_definitions_are_loaded_and_the_sensor_runs(stack: Stack) -> None:
    dagster = Dagster(dagster_url(stack.settings))
    assert [entry["name"] for entry in dagster.locations()] == ["tide"]
    assert dagster.sensors()["enough_hidden_states"]["status"] == "RUNNING"
    assert dagster.runs() == []


def test_the_sensor_ticks_without_an_error(stack: Stack) -> None:
    dagster, deadline = Dagster(dagster_url(stack.settings)), time.monotonic() + 120
    while not (ticks := dagster.sensors()["enough_hidden_states"]["ticks"]):
        assert time.monotonic() < deadline, "no tick"
        time.sleep(1)
    assert ticks[0]["status"] in ("SKIPPED", "STARTED") and ticks[0]["error"] is None


def test_the_exporter_tells_of_the_stack(stack: Stack) -> None:
    """Storage with its keys and the ledger; no server is up here, so there is no spool."""
    expected = dict.fromkeys(stack.settings.metrics.parts, "1.0") | {"files": "0.0"}
    deadline = time.monotonic() + 120
    while True:  # what is slow to load on a busy machine is told as not read at first
        text = httpx.get(stack.addresses()["metrics"], timeout=30).text
        up = dict(re.findall(r'^tide_up{what="(\w+)"} (\S+)$', text, re.MULTILINE))
        if up == expected:
            break
        assert time.monotonic() < deadline, up
        time.sleep(1)
    server = f"http://127.0.0.1:{stack.settings.serving.port}"
    assert f'tide_server_up{{server="{server}"}} 0.0' in text


def test_mlflow_keeps_its_artifacts_in_the_object_storage(stack: Stack) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(stack.settings.registry.tracking_uri)
    run = client.create_run(client.create_experiment("stack-test"))
    client.log_text(run.info.run_id, "hello", "note.txt")
    stored = ObjectStore(stack.settings.storage).list("mlflow")
    assert [key for key in stored if key.endswith(f"{run.info.run_id}/artifacts/note.txt")]


def test_a_killed_service_is_started_again(stack: Stack) -> None:
    before = stack.supervisor.states()[services.WEBSERVER].pid
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        state = stack.supervisor.states()[services.WEBSERVER]
        if state.name == "RUNNING" and state.pid != before:
            break
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


def test_a_second_process_is_refused_and_status_shows_all(stack: Stack, state: Path) -> None:
    refused = _tide("stack", "up", "--state", str(state), "--ports", "auto")
    assert refused.returncode == 2 and str(os.getpid()) in refused.stderr
    shown = _tide("stack", "status", "--state", str(state))
    assert shown.returncode == 0 and "storage" in shown.stdout and "http://127.0.0.1:" in shown.stdout


def test_data_outlives_the_stack_and_processes_do_not(stack: Stack, state: Path) -> None:
    stack.down()
    assert find_leftovers(state) == [] and stack_states(Layout(state)) == {}
    with Stack(_settings(state), auto_ports=True) as again:
        again.open(die_with_parent=True)
        again.start([services.STORAGE])
        assert ObjectStore(again.settings.storage).get_bytes("kept") == b"value"
    assert find_leftovers(state) == []


def test_killing_the_owner_ends_the_stack(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    assert owner.stdout is not None
    while owner.stdout.readline().strip() != "up":
        assert owner.poll() is None
    assert find_leftovers(tmp_path)
    owner.kill()
    owner.wait()
    _wait_gone(tmp_path, 30)


def test_interrupting_the_start_ends_all(tmp_path: Path) -> None:
    command = [*TIDE, "stack", "up", "--no-server", "--state", str(tmp_path), "--ports", "auto"]
    starting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment())
    deadline = time.monotonic() + 120
    while len(stack_states(Layout(tmp_path))) == 0:
        assert time.monotonic() < deadline and starting.poll() is None
        time.sleep(0.2)
    starting.send_signal(signal.SIGINT)
    assert starting.wait(60) == 130
    assert find_leftovers(tmp_path) == []


def _tide(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TIDE, *words], capture_output=True, text=True, timeout=120, env=_environment())


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}


def _wait_gone(state: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := find_leftovers(state):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
