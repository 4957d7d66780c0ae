"""What is done about faults, what is checked before pods start, and that removing them has an end."""

from pathlib import Path
from typing import Any

import pytest

from tide_platform.cluster import faults, leftovers
from tide_platform.cluster.access import NoClusterAccess
from tide_platform.cluster.api import KubeApi
from tide_platform.cluster.faults import ApiUnavailable, LostTooOften, MemoryNotEnough, PodFault
from tide_platform.cluster.policy import LEAST_POSITIONS, on_gpu, shrink, with_policy
from tide_platform.cluster.shared import NotShared, check_shared
from tide_platform.cluster.watcher import Limits, Watch
from tide_platform.config import Settings
from tide_platform.config.cluster import Cluster, TrainerPods
from tide_platform.training.job import TrainJob

LOST = faults.PodDeleted(pod="p")
MEMORY = faults.OutOfMemory(pod="p", how="OOMKilled")
FINAL = faults.TrainerFailed(pod="p", how="exit status 2", words="no store")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    settings = Settings(state=tmp_path)
    settings.storage.uri = str(tmp_path / "store")
    settings.training.micro_batch_positions = 512
    path = tmp_path / "job.json"
    TrainJob(
        settings=settings, target=tmp_path / "target", parent=tmp_path / "parent", lance_version=1,
        train_sample_ids=["a"], out=tmp_path,
    ).write(path)  # fmt: skip
    return path


def pods(**changes: Any) -> TrainerPods:
    return TrainerPods.model_validate({"profile": "cpu", "image": "i", **changes})


def attempts(job: Path, outcomes: list[PodFault | None], **settings: Any) -> tuple[list[int], list[str]]:
    made: list[int] = []
    said: list[str] = []

    def attempt(number: int) -> None:
        made.append(number)
        if (fault := outcomes[number - 1]) is not None:
            raise fault

    try:
        with_policy(pods(**settings), job, attempt, said.append)
    finally:
        assert made == list(range(1, len(made) + 1)) and len(made) == len(outcomes)
    return made, said


def test_lost_and_out_of_memory_are_counted_apart(job: Path) -> None:
    made, said = attempts(job, [LOST, MEMORY, LOST, MEMORY, None], max_lost=2, max_shrinks=2)
    assert len(made) == 5 and len(said) == 4
    assert TrainJob.read(job).settings.training.micro_batch_positions == 128


def test_each_has_its_limit(job: Path) -> None:
    with pytest.raises(LostTooOften, match="after 3 lost attempts") as lost:
        attempts(job, [LOST, LOST, LOST], max_lost=2)
    assert lost.value.__cause__ is LOST
    with pytest.raises(MemoryNotEnough, match="positions 256") as memory:
        attempts(job, [MEMORY, MEMORY], max_shrinks=1)
    assert memory.value.positions == 256
    with pytest.raises(faults.TrainerFailed):
        attempts(job, [FINAL])


def test_pods_with_gpus_ask_for_them(job: Path) -> None:
    on_gpu(job)
    assert TrainJob.read(job).settings.training.device == "cuda"


@pytest.mark.parametrize("profile", ["mi250", "h100"])
def test_eight_processes_have_memory_for_themselves(profile: str) -> None:
    made = pods(profile=profile)
    assert (made.cpu, made.memory, made.shared_memory) == ("32", "256Gi", "32Gi")
    assert pods(profile=profile, memory="64Gi").memory == "64Gi" and pods().memory == "64Gi"


def test_the_least_micro_batch_is_not_halved(job: Path) -> None:
    while shrink(job) > LEAST_POSITIONS:
        pass
    with pytest.raises(MemoryNotEnough, match=f"positions {LEAST_POSITIONS}; raise"):
        attempts(job, [MEMORY], max_shrinks=99)


@pytest.mark.parametrize(
    ("volumes", "what"),
    [
        ([], "the job's file"),
        ([{"claim": "c", "path": "{}", "read_only": True}], "the job's folder"),
        ([{"claim": "c", "path": "{}/elsewhere"}], "the job's file"),
    ],
)
def test_a_path_that_the_pods_would_not_find_is_named(job: Path, volumes: list[dict], what: str) -> None:
    read = TrainJob.read(job)
    check_shared(pods(volumes=[{"claim": "c", "path": str(job.parent)}]), job, read)
    mounts = [each | {"path": each["path"].format(job.parent)} for each in volumes]
    with pytest.raises(NotShared) as error:
        check_shared(pods(volumes=mounts), job, read)
    assert error.value.what == what and "cluster.trainer.volumes" in str(error.value)


def test_a_target_outside_the_volumes_is_named_and_an_object_store_is_not(job: Path) -> None:
    read = TrainJob.read(job)
    read.settings.storage.uri = "s3://bucket/store"
    mounted = pods(volumes=[{"claim": "c", "path": str(job.parent)}])
    check_shared(mounted, job, read)
    read.target = Path("/models/target")
    with pytest.raises(NotShared, match=r"do not see the target \(/models/target\)"):
        check_shared(mounted, job, read)


def test_no_cluster_is_named() -> None:
    with pytest.raises(NoClusterAccess, match=r"the pod's service account: .*, or set cluster.kubeconfig"):
        KubeApi(Cluster())
    with pytest.raises(NoClusterAccess, match=r"kubeconfig /nowhere: .*; see to the file"):
        KubeApi(Cluster(kubeconfig=Path("/nowhere")))


class Silent:
    """An API that answers ``pods`` from a list; None is no answer."""

    def __init__(self, answers: list[list[dict] | None]):
        self._answers = answers

    def pods(self, _labels: object) -> list[dict]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise ApiUnavailable(host="h", message="refused")
        return answer

    def jobs(self, _labels: object) -> list[dict]:
        return []

    services = jobs

    def delete(self, _kind: str, _name: str) -> None: ...


def pod(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "labels": {}},
        "spec": {"nodeName": "n", "containers": [{"name": "trainer", "image": "i"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]},
    }


def watch(answers: list[list[dict] | None], said: list[str], patience: float) -> None:
    limits = Limits(schedule=1, start=1, poll=0.01, api=patience)
    api: Any = Silent(answers)
    Watch(api, {}, 1, limits, said.append, lambda: None, lambda: False).run()


def test_pods_train_on_while_the_api_server_is_away() -> None:
    running, done = pod({"running": {}}), pod({"terminated": {"exitCode": 0, "reason": "Completed"}})
    said: list[str] = []
    watch([[running], None, None, [running], [done]], said, patience=5)
    assert said == [
        "pod p runs on node n",
        "the Kubernetes API at h does not answer: refused; see to cluster.kubeconfig and to the server; the "
        "pods are watched again when it does",
        "pod p ended with exit status 0 (Completed)",
    ]
    with pytest.raises(ApiUnavailable):
        watch([[running], None], [], patience=0.1)


def test_a_pod_that_nothing_ends_is_left_to_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_S", 0.05)
    monkeypatch.setattr(leftovers, "_SLACK_S", 0.05)
    said: list[str] = []
    api: Any = Silent([[pod({"running": {}})]])
    leftovers.remove_and_wait(api, {}, said.append, poll_s=0.01)
    assert said == ["still being deleted, left to Kubernetes: p"]
