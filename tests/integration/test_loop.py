"""The loop with nobody's hand on it: real SGLang, ingest, Dagster, trainer and MLflow, on the tiny target.

One run is killed on the way: the window must not be lost. Then a ruined draft is served past all checks: the
platform takes it back by itself.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import dagster as dg
import numpy as np
import psutil
import pytest
import yaml

from tests.free_ports import free_port
from tide_platform.config import Settings, draft_digest, load_settings
from tide_platform.control import cycle, hands
from tide_platform.control.champion import ensure_champion, store_draft
from tide_platform.control.guard import Barred
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State
from tide_platform.serving.admin import read_admin_key
from tide_platform.serving.client import SglangClient
from tide_platform.serving.launch import base_url
from tide_platform.serving.processes import end_tree, tree

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny_target"
TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
SAMPLES, REFERENCE = 24, 12
MAX_NEW_TOKENS = 40


class Loop:
    """The services of one deployment, each logging into ``folder``."""

    def __init__(self, folder: Path, draft: Path):
        self.folder = folder
        self.config = folder / "tide.yaml"
        self.config.write_text(yaml.safe_dump(configuration(folder, draft)))
        self.settings: Settings = load_settings(self.config, {})
        self.home = folder / "dagster"
        self.home.mkdir()
        shutil.copyfile(ROOT / "deployments" / "local" / "dagster.yaml", self.home / "dagster.yaml")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.members: dict[int, psutil.Process] = {}
        self.ledger = Ledger(self.settings.ledger.url)

    def configure(self, section: str, **values: object) -> None:
        """Changed in the file, which the sensors read at each tick."""
        told = yaml.safe_load(self.config.read_text())
        told[section] |= values
        self.config.write_text(yaml.safe_dump(told))

    def start(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("TIDE_", "DAGSTER_"))}
        environment = plain | {
            "TIDE_CONFIG": str(self.config),
            "DAGSTER_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
        }
        with self.log(name).open("wb") as log:
            process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def client(self) -> SglangClient:
        return SglangClient(base_url(self.settings), read_admin_key(self.settings))

    def send(self, count: int, tenant: str, seed: int) -> None:
        """Captured requests of the kind that the tiny target knows.

        Their ids are the same in each run of this test, and so is the choice of what validates.
        """
        from tiny import prompts

        with self.client() as client:
            for number, prompt in enumerate(prompts(count, length=24, seed=seed).tolist()):
                client.generate(prompt, MAX_NEW_TOKENS, tenant=tenant, rid=f"{tenant}-{seed}-{number}")

    def window(self) -> WindowRecord | None:
        return next(iter(self.ledger.windows(self.settings.deployment)), None)

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds} s; {self.window()}\n{self.logs()}"
            assert all(process.poll() is None for process in self.processes), f"a service died\n{self.logs()}"
            time.sleep(0.5)
        self.members |= {member.pid: member for process in self.processes for member in tree(process.pid)}

    def logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob("state/logs/*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in paths)

    def end(self) -> None:
        self.ledger.close()
        for process in reversed(self.processes):
            end_tree(process, self.members.values(), 30)


def configuration(folder: Path, draft: Path) -> dict[str, object]:
    port = free_port()
    return {
        "target": str(TINY),
        "draft": str(draft),
        "state": str(folder / "state"),
        "serving": {"port": port, "threads": 1, "context_length": 256, "max_total_tokens": 2048},
        "capture": {
            "ring_bytes": 16 << 20,
            "segment_bytes": 1 << 20,
            "segment_seconds": 0.5,
            "teacher_k": 16,
        },
        "ingest": {"commit_seconds": 0.5, "poll_seconds": 0.2},
        "storage": {"uri": str(folder / "store")},
        "window": {"min_samples": SAMPLES, "validation_share": 0.3, "sensor_seconds": 2, "retry_s": 1},
        "watch": {"sensor_seconds": 2, "mend_seconds": 1},
        "training": {"epochs": 8, "threads": 1, "learning_rate": 2e-3},
        "registry": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "ledger": {"url": f"sqlite:///{folder}/ledger.db"},
    }


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft

    save_draft(
        tmp_path / "first", new_draft(load_target_parts(TINY), np.arange(128)), {"made": "for this test"}
    )
    loop = Loop(tmp_path, tmp_path / "first")
    yield loop
    loop.end()


def test_traffic_becomes_a_better_draft_though_a_run_is_killed(loop: Loop):
    loop.start("serve", [*TIDE, "serve"])
    loop.start("ingest", [*TIDE, "ingest"])
    loop.wait("the server", lambda: "ready at" in loop.log("serve").read_text(), 300)
    ledger = Ledger(loop.settings.ledger.url)
    first = ensure_champion(loop.settings, ledger)
    ledger.close()
    assert first.digest == draft_digest(loop.folder / "first")
    loop.send(REFERENCE, "reference", seed=1)
    loop.send(SAMPLES, "maths", seed=2)
    program = str(Path(sys.executable).with_name("dagster-daemon"))
    loop.start("daemon", [program, "run", "-w", str(ROOT / "workspace.yaml")])

    loop.wait("a run that trains", lambda: trainer_of(loop) is not None, 120)
    trainer = trainer_of(loop)
    assert trainer is not None
    worker = trainer.parent()
    assert worker is not None
    worker.kill()
    loop.wait("the trainer to end with its run", lambda: not trainer.is_running(), 30)

    loop.wait("the end of the window", lambda: (w := loop.window()) is not None and w.state.final, 180)
    record = loop.window()
    assert record is not None
    assert record.state is State.DEPLOYED, record
    assert record.attempt == 2 and record.challenger is not None
    with loop.client() as client:
        assert client.status()["draft_digest"] == record.challenger != first.digest
    check_dagster(loop, record)
    check_registry(loop, record, first.digest)
    loop.configure("window", min_samples=10_000)  # a further window would take the ruined draft's place first
    check_rollback(loop, record.challenger)


def check_rollback(loop: Loop, champion: str) -> None:
    """A hand serves a draft that never hits, without a watch; live traffic shows it, a replay proves it."""
    loop.send(40, "maths", seed=3)
    loop.wait("the champion's requests to be seen", lambda: len(memory_of(loop).requests) >= 40, 60)
    ruined = register_ruined(loop, champion)
    hands.promote(loop.settings, loop.ledger, ruined, "somebody", "by mistake", watched=False)
    loop.wait("the draft to be looked at", lambda: memory_of(loop).draft == ruined, 60)
    loop.send(60, "maths", seed=4)
    loop.wait("the rollback", lambda: loop.ledger.champion("demo") == champion, 180)
    with loop.client() as client:
        assert client.status()["draft_digest"] == champion
    barred = loop.ledger.guard.barred("demo", ruined)
    assert barred is not None and barred.actor == "sensor" and "against the draft before it" in barred.reason
    with dg.DagsterInstance.from_config(str(loop.home)) as instance:
        mending = instance.get_runs(dg.RunsFilter(job_name="mend_deployment"))
        loop.wait("its run to end", lambda: instance.get_runs()[0].is_finished, 30)
        assert mending and "against the draft before it" in mending[-1].tags["tide/why"]
    with pytest.raises(Barred):
        hands.promote(loop.settings, loop.ledger, ruined, "somebody", "again")


def memory_of(loop: Loop) -> Memory:
    return Memory.from_json(loop.ledger.controls.get("demo", MEMORY))


def register_ruined(loop: Loop, champion: str) -> str:
    """The champion with its last layer's signs turned, known to the registry; its digest."""
    from safetensors.torch import load_file, save_file

    from tide_platform.registry.mlflow_registry import DraftRegistry

    folder = loop.folder / "ruined"
    shutil.copytree(loop.settings.drafts_folder / champion, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: -value if name == "lm_head.weight" else value for name, value in weights.items()},
        folder / "model.safetensors",
    )
    digest = draft_digest(folder)
    registry = DraftRegistry(loop.settings)
    run_id = registry.begin("ruined", {"digest": digest}, {})
    registry.register(run_id, folder, digest, store_draft(loop.settings, folder, digest), {}, {})
    registry.end(run_id)
    return digest


def trainer_of(loop: Loop) -> psutil.Process | None:
    """The ``tide train`` that runs, if one does."""
    for process in tree(loop.processes[-1].pid):
        try:
            if "train" in process.cmdline() and "--job" in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def check_dagster(loop: Loop, record: WindowRecord) -> None:
    with dg.DagsterInstance.from_config(str(loop.home)) as instance:
        runs = instance.get_runs()  # newest first
        assert [run.tags["dagster/run_key"] for run in runs] == ["demo/w00001/2", "demo/w00001/1"]
        assert all(run.tags["dagster/sensor_name"] == "enough_hidden_states" for run in runs)
        loop.wait("the run's last event", lambda: statuses(instance)[0] == "SUCCESS", 30)
        assert statuses(instance) == ["SUCCESS", "FAILURE"]
        assert runs[0].run_id == record.run_id
        for name in ("hidden_states", "draft_checkpoint", "acceptance_report", "serving_draft"):
            event = instance.get_latest_materialization_event(dg.AssetKey(name))
            assert event is not None and event.asset_materialization is not None
            assert event.asset_materialization.partition == "demo/w00001"


def statuses(instance: dg.DagsterInstance) -> list[str]:
    return [run.status.value for run in instance.get_runs()]


def check_registry(loop: Loop, record: WindowRecord, first: str) -> None:
    from tide_platform.registry.mlflow_registry import CHAMPION, DraftRegistry

    champion = DraftRegistry(loop.settings).alias(CHAMPION)
    assert champion is not None and champion.digest == record.challenger
    status = cycle.status(loop.settings)[0]
    assert status.verdict is not None and status.verdict.passed and status.verdict.champion == first
