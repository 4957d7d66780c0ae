"""Two deployments in one Dagster instance, as two code locations of one workspace with one ledger: each
adapts its own draft and touches nothing of the other. The SGLang servers are stood in for.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest
import yaml

from tests.fixtures.small import land, small_settings
from tests.fixtures.stand_in import StandIn, stand_in
from tests.free_ports import free_ports
from tide_platform.config import Settings, draft_digest, dump_settings
from tide_platform.control.ledger import Ledger, opened
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State
from tide_platform.serving.processes import end_tree, tree

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
NAMES = ("a", "b")
BIN = Path(sys.executable).parent


class Two:
    """Settings and stand-in servers by deployment, and what runs for them."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.home = folder, folder / "dagster"
        self.settings: dict[str, Settings] = {}
        self.servers: dict[str, StandIn] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        ports = free_ports(2)
        for name, port in zip(NAMES, ports, strict=True):
            settings = small_settings(folder / name, name)
            settings.serving.port = port
            # one ledger and one store: the deployment's name is all that keeps them apart
            settings.ledger.url = f"sqlite:///{folder}/ledger.db"
            settings.storage.uri = str(folder / "store")
            (folder / f"{name}.yaml").write_text(dump_settings(settings))
            assert settings.draft is not None
            self.servers[name] = stack.enter_context(stand_in(port, draft_digest(settings.draft)))
            self.settings[name] = settings

    def start(self) -> None:
        """The code servers, then the daemon on both of them."""
        self.home.mkdir()
        config = yaml.safe_load((ROOT / "deployments" / "local" / "dagster.yaml").read_text())
        config["concurrency"]["runs"]["max_concurrent_runs"] = 2
        (self.home / "dagster.yaml").write_text(yaml.safe_dump(config))
        # of processes that make the tables of a fresh home at once one fails: they are there before
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            assert instance.get_runs() == [] and instance.all_instigator_state() == []
        locations = []
        for name, port in zip(NAMES, free_ports(2), strict=True):
            argv = [str(BIN / "dagster"), "api", "grpc", "--host", "127.0.0.1", "--port", str(port)]
            argv += ["--module-name", "tide_platform.definitions", "--location-name", name]
            self._run(name, argv, {"TIDE_CONFIG": str(self.folder / f"{name}.yaml")})
            server = {"host": "127.0.0.1", "port": port, "location_name": name}
            locations.append({"grpc_server": server})
        workspace = self.folder / "workspace.yaml"
        workspace.write_text(yaml.safe_dump({"load_from": locations}))
        self._run("daemon", [str(BIN / "dagster-daemon"), "run", "-w", str(workspace)], {})

    def _run(self, name: str, argv: list[str], more: dict[str, str]) -> None:
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("TIDE_", "DAGSTER_"))}
        own = {"DAGSTER_HOME": str(self.home), "TIDE_ADMIN_KEY": "a-test", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=plain | own | more, stdout=log, stderr=subprocess.STDOUT
            )
        self.processes.append(process)

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self.logs()}"
            assert all(process.poll() is None for process in self.processes), f"one died\n{self.logs()}"
            time.sleep(1)

    def logs(self) -> str:
        paths = self.folder.glob("*.log")
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)

    def end(self) -> None:
        for process in reversed(self.processes):
            end_tree(process, tree(process.pid), 30)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with ExitStack() as stack:
        two = Two(tmp_path, stack)
        yield two
        two.end()
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def windows(ledger: Ledger, name: str) -> list[WindowRecord]:
    return ledger.windows(name)


def test_each_adapts_its_own_draft(two: Two) -> None:
    for number, name in enumerate(NAMES):
        land(two.settings[name], 12, seed=2 * number, tenant="reference")
        land(two.settings[name], 6, seed=2 * number + 1)
    two.start()
    with opened(two.settings["a"].ledger.url) as ledger:

        def ended() -> bool:
            found = [window for name in NAMES for window in windows(ledger, name)]
            return len(found) == 2 and all(window.state.final for window in found)

        two.wait("both windows to end", ended, 420)
        records = {name: windows(ledger, name)[0] for name in NAMES}
    assert {record.state for record in records.values()} <= {State.DEPLOYED, State.REJECTED}
    for name, record in records.items():
        assert record.attempt == 1, record
        served = [record.challenger] if record.state is State.DEPLOYED else []
        assert two.servers[name].reloads == served
    with dg.DagsterInstance.from_config(str(two.home)) as instance:
        two.wait("the runs' last events", lambda: all(run.is_finished for run in instance.get_runs()), 60)
        assert set(instance.get_dynamic_partitions("windows")) == {"a/w00001", "b/w00001"}
        runs = instance.get_runs()
        assert {run.tags["dagster/partition"]: location(run) for run in runs} == {
            "a/w00001": "a",
            "b/w00001": "b",
        }
        assert len(runs) == 2
        # each waited in pools of its own
        pools = {key for run in runs for key in (run.run_op_concurrency.all_pools or ())}  # type: ignore[union-attr]
        assert pools == {f"{pool}/{name}" for pool in ("training", "deployment") for name in NAMES}


def location(run: dg.DagsterRun) -> str:
    assert run.remote_job_origin is not None
    return run.remote_job_origin.location_name
