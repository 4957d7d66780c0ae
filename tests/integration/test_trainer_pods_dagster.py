"""Training pods as a step of Dagster has them: Pipes, the run's log, the same tide.yaml but for `cluster`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

from fakekube import FakeKube, Logs, Trouble, after, fake_kube
from pod_world import PodWorld, pod_world

from resources.runs import DagsterRuns
from resources.trainer import Trainer
from resources.trainer_pods import remove_pods_left_behind
from tide_platform.config import Settings, draft_digest, dump_settings, load_settings
from tide_platform.training.job import RESULT, TrainJob, TrainResult

pytestmark = pytest.mark.integration
PARTITION = "demo/w00001"


@dataclass
class Step:
    """The trainer's command within a step of Dagster, configured by a tide.yaml."""

    instance: dg.DagsterInstance
    config: Path
    steps: list[int] = field(default_factory=list)
    run_id: str = ""

    def configure(self, settings: Settings, cluster: dict[str, Any] | None = None) -> None:
        raw = yaml.safe_load(dump_settings(settings))
        self.config.write_text(yaml.safe_dump(raw | ({"cluster": cluster} if cluster else {})))

    def train(self, job: Path) -> dg.ExecuteInProcessResult:
        self.steps = []

        @dg.asset(partitions_def=dg.StaticPartitionsDefinition([PARTITION]))
        def draft_checkpoint(context: dg.AssetExecutionContext, trainer: Trainer) -> dg.MaterializeResult:
            trainer.command(context)(job, lambda record: self.steps.append(record["step"]), lambda: False)
            return dg.MaterializeResult()

        result = dg.materialize(
            [draft_checkpoint],
            resources={"trainer": Trainer()},
            instance=self.instance,
            partition_key=PARTITION,
            raise_on_error=False,
        )
        self.run_id = result.run_id
        return result

    @property
    def log(self) -> str:
        return "\n".join(each.user_message for each in self.instance.all_logs(self.run_id))

    @property
    def why(self) -> str:
        return DagsterRuns(self.instance).why(self.run_id)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    monkeypatch.setenv("TIDE_CONFIG", str(tmp_path / "tide.yaml"))
    with dg.instance_for_test() as instance:
        yield Step(instance, tmp_path / "tide.yaml")


@pytest.fixture(params=[1, 2], ids=["one pod", "two pods"])
def world(request: pytest.FixtureRequest, tmp_path: Path, step: Step) -> Iterator[PodWorld]:
    with pod_world(tmp_path, nodes=request.param, schedule_timeout_s=3) as made:
        step.configure(Settings(), made.cluster.model_dump(mode="json", exclude_none=True))
        yield made


def test_the_runs_log_tells_what_becomes_of_the_pods(world: PodWorld, step: Step) -> None:
    world.misbehave(step_s=0.5)  # two looks at the pods are two seconds apart
    world.fake.plan(1, Trouble("preempted", "Preempted by pod serving-0", after('"step": 5,')))
    assert step.train(world.job).success
    assert step.steps == list(range(1, 9)) and world.fake.left() == []
    assert "runs on node node-1" in step.log
    assert "Preempted by pod serving-0); started again (1 of 3)" in step.log
    for pod in world.fake.made:
        variables = {each["name"] for each in pod["spec"]["containers"][0]["env"]}
        assert {"DAGSTER_PIPES_CONTEXT", "DAGSTER_PIPES_MESSAGES"} <= variables
        assert pod["metadata"]["labels"]["tide/run"] == step.run_id
    assert "the stand-in trains 8 steps" in step.log  # by Pipes


def test_a_pod_that_no_node_takes_fails_the_step_with_the_schedulers_words(
    world: PodWorld, step: Step
) -> None:
    world.fake.plan(1, Trouble("unschedulable", "0/3 nodes are available: 3 Insufficient amd.com/gpu."))
    assert not step.train(world.job).success
    assert "3 Insufficient amd.com/gpu.; make room for it" in step.why
    assert world.fake.left() == []


def test_the_sensor_removes_pods_of_runs_that_are_over(step: Step, tmp_path: Path) -> None:
    with pod_world(tmp_path) as world:
        step.configure(Settings(), world.cluster.model_dump(mode="json", exclude_none=True))
        assert step.train(world.job).success
        dead = world.fake.made[0]
        for run, name in ((step.run_id, "dead"), ("unknown", "stray")):
            labels = dead["metadata"]["labels"] | {"tide/run": run}
            spec = {"containers": [{"name": "trainer", "image": "i", "command": ["sleep", "60"]}]}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": labels},
                "spec": spec,
            }
            world.fake.store.add("pods", pod | {"status": {"phase": "Pending"}})
            world.fake.launched("pods", pod)
        said: list[str] = []
        remove_pods_left_behind(load_settings(), DagsterRuns(step.instance), said.append)
        assert len(said) == 2 and f"removed dead of run {step.run_id}, which left it behind" in said
        remove_pods_left_behind(Settings(), DagsterRuns(step.instance), said.append)  # no cluster, no call
        assert len(said) == 2


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Iterator[FakeKube]:
    with fake_kube(tmp_path_factory.mktemp("kube"), {"state": shared}) as made:
        yield made


@pytest.fixture(scope="module")
def job(shared: Path) -> TrainJob:
    from tiny_job import shared_job

    return shared_job(shared)


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_the_cluster_section_moves_training_to_pods(
    step: Step, fake: FakeKube, shared: Path, job: TrainJob, nodes: int
) -> None:
    """The real `tide train`: as a process, then in pods, preempted half way; two are joined by torchrun."""
    trainer = {
        "profile": "cpu", "image": "tide-trainer:1", "nodes": nodes,
        "volumes": [{"claim": "state", "path": str(shared)}],
    }  # fmt: skip
    cluster = {"kubeconfig": str(fake.kubeconfig), "trainer": trainer}
    before = fake.launches
    fake.plan(before + 1, Trouble("preempted", "Preempted by pod serving-0", after('"step": 10,')))
    results = []
    for name, section in {"process": None, "pods": cluster}.items():
        step.configure(job.settings, section)
        out = shared / f"{name}-{nodes}"
        mine = job.model_copy(update={"out": out, "settings": load_settings()})
        mine.write(out.with_suffix(".json"))
        done = step.train(out.with_suffix(".json"))
        assert done.success, step.log
        assert step.steps == list(range(1, step.steps[-1] + 1))
        result = TrainResult.read(out / RESULT)
        assert result is not None and result.digest == draft_digest(out / "draft")
        results.append(result)
    alone, pods = results
    assert (alone.processes, pods.processes) == (1, nodes)
    assert [r["loss"] for r in pods.history] == pytest.approx([r["loss"] for r in alone.history], rel=0.01)
    if nodes == 1:
        assert pods.digest == alone.digest  # to the bit
    assert fake.launches == before + 2 and fake.left() == []
    assert "(1 of 3), training goes on where it was" in step.log
    assert "goes on with a run of which" in step.log  # by Pipes, from the trainer itself


def test_merged_log_lines_lose_pipes_messages_and_nothing_else(step: Step, tmp_path: Path) -> None:
    """dagster-k8s 0.29.27 joins lines of one timestamp: the message that opens Pipes is then none."""
    with pod_world(tmp_path) as world:
        world.fake.logs = Logs(one_stamp=True)
        step.configure(Settings(), world.cluster.model_dump(mode="json", exclude_none=True))
        assert step.train(world.job).success and step.steps == list(range(1, 9))
        assert "did not receive any messages from external process" in step.log
        assert "the stand-in trains" not in step.log
