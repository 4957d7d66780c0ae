"""What a pod's state amounts to: statuses as Kubernetes writes them, and which fault they are."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tide_platform.cluster import faults
from tide_platform.cluster.diagnose import broken, disturbed, gone, last_words, silent_since, unstarted
from tide_platform.cluster.faults import FAULTS, QUIET, PodFault, markdown_table
from tide_platform.cluster.pods import PodView, Said


def pod(phase: str = "Running", state: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [{"name": "trainer", "state": state}] if state else []
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {}},
        "spec": {"nodeName": "n1", "containers": [{"name": "trainer", "image": "i:1"}]},
        "status": {"phase": phase, "containerStatuses": containers, **status},
    }


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": "t"}}


def disrupted(reason: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}]


CASES: dict[str, tuple[dict[str, Any], type[PodFault] | None, str]] = {
    "runs": (pod(state={"running": {}}), None, ""),
    "ended well": (pod("Succeeded", ended(0, "Completed")), None, ""),
    "out of memory": (pod("Failed", ended(137, "OOMKilled")), faults.OutOfMemory, "OOMKilled"),
    "killed by someone": (pod("Failed", ended(137)), faults.TrainerFailed, "exit status 137 (SIGKILL)"),
    "memory of a GPU": (
        pod("Failed", ended(1, message="torch.OutOfMemoryError: CUDA out of memory.")),
        faults.OutOfMemory, "GPU",
    ),
    "preempted while it ends": (
        pod(state={"running": {}}, conditions=disrupted("PreemptionByScheduler")), None, "",
    ),
    "preempted": (
        pod("Failed", ended(143), conditions=disrupted("PreemptionByScheduler")), faults.Preempted, "n1",
    ),
    "drained": (
        pod("Failed", ended(143), conditions=disrupted("EvictionByEvictionAPI")), faults.Preempted, "m",
    ),
    # the node's memory, not the pod's: the same micro-batch is right elsewhere
    "evicted": (
        pod("Failed", reason="Evicted", message="low on resource: memory"), faults.Preempted, "Evicted: low",
    ),
    "tainted node": (
        pod("Failed", ended(137), conditions=disrupted("DeletionByTaintManager")), faults.NodeLost, "m",
    ),
    "node gone": (pod("Failed", conditions=disrupted("DeletionByPodGC")), faults.NodeLost, "DeletionByPodGC"),
    "node lost": (pod("Failed", reason="NodeLost", message="unresponsive"), faults.NodeLost, "unresponsive"),
    "kubelet's refusal": (
        pod("Failed", reason="UnexpectedAdmissionError", message="no such device"),
        faults.Preempted, "device",
    ),
    "pull is tried again": (
        pod("Pending", {"waiting": {"reason": "ErrImagePull", "message": "i/o timeout"}}), None, "",
    ),
    "no such image": (
        pod("Pending", {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}),
        faults.ImagePullFailed, "i:1",
    ),
    "bad name": (
        pod("Pending", {"waiting": {"reason": "InvalidImageName", "message": "x"}}),
        faults.ImagePullFailed, "x",
    ),
    "init": (
        pod("Failed", initContainerStatuses=[{"name": "istio-init", "state": ended(1)}]),
        faults.InitFailed, "istio-init",
    ),
    "no words": (pod("Failed", ended(2)), faults.TrainerFailed, "it said nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_state_is_this_fault(name: str) -> None:
    raw, fault, shows = CASES[name]
    found = broken(PodView.of(raw))
    assert type(found) is (fault or type(None))
    assert shows in str(found or "")


def test_a_sidecars_end_is_not_the_trainers() -> None:
    raw = pod(state={"running": {}})
    raw["status"]["containerStatuses"].append({"name": "istio-proxy", "state": ended(1)})
    assert broken(PodView.of(raw)) is None and PodView.of(raw).started


@pytest.mark.parametrize("status", [1, 137, 143])
def test_what_a_deleted_pod_ends_with_is_no_failure_of_the_trainer(status: int) -> None:
    """torchrun ends with 1 on SIGTERM."""
    raw = pod("Failed", ended(status))
    assert isinstance(broken(PodView.of(raw)), faults.TrainerFailed)
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert isinstance(broken(PodView.of(raw)), faults.PodDeleted)
    raw["status"]["containerStatuses"][0]["state"] = ended(137, "OOMKilled")
    assert isinstance(broken(PodView.of(raw)), faults.OutOfMemory)


def test_memory_of_the_host_is_answered_with_smaller_micro_batches_only_without_gpus() -> None:
    raw = pod("Failed", ended(137, "OOMKilled"))
    container = raw["spec"]["containers"][0]
    container["resources"] = {"limits": {"cpu": "8", "memory": "64Gi"}}
    assert broken(PodView.of(raw)).answer is faults.Answer.SMALLER  # type: ignore[union-attr]
    container["resources"]["limits"]["amd.com/gpu"] = "8"
    fault = broken(PodView.of(raw))
    assert fault is not None and fault.answer is faults.Answer.FINAL
    assert "raise cluster.trainer.memory" in str(fault)
    raw["status"]["containerStatuses"][0]["state"] = ended(1, message="HIP out of memory")
    assert isinstance(broken(PodView.of(raw)), faults.OutOfMemory)


def test_a_pod_that_is_being_taken_away_explains_its_peers_failure() -> None:
    assert disturbed(PodView.of(pod(state={"running": {}}))) is None
    going = pod(state={"running": {}}, conditions=disrupted("PreemptionByScheduler"))
    assert broken(PodView.of(going)) is None and isinstance(disturbed(PodView.of(going)), faults.Preempted)
    deleted = pod(state={"running": {}})
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert isinstance(disturbed(PodView.of(deleted)), faults.PodDeleted)
    silent = [{"type": "Ready", "status": "False", "reason": "NodeNotReady", "message": "m"}]
    assert isinstance(disturbed(PodView.of(pod(state={"running": {}}, conditions=silent))), faults.NodeLost)


@pytest.mark.parametrize(
    ("events", "job_end", "fault"),
    [
        ([], None, faults.PodDeleted),
        ([{"reason": "Killing", "message": "Stopping container"}], None, faults.PodDeleted),
        ([{"reason": "Preempted", "message": "by p2"}], None, faults.Preempted),
        ([{"reason": "TaintManagerEviction"}, {"reason": "Killing"}], None, faults.NodeLost),
        ([], Said("PodFailurePolicy", "Pod t/p has condition DisruptionTarget"), faults.Preempted),
        ([], Said("BackoffLimitExceeded", "reached"), faults.PodDeleted),
    ],
)
def test_a_pod_that_is_gone_is_known_by_what_it_left(
    events: list[dict[str, Any]], job_end: Said | None, fault: type[PodFault]
) -> None:
    assert type(gone(PodView.of(pod(state={"running": {}})), events, job_end)) is fault


def test_a_node_that_lets_a_deletion_pass_does_not_answer() -> None:
    raw = pod(state={"running": {}})
    now = datetime.now(UTC)
    assert silent_since(PodView.of(raw), now) is None
    raw["metadata"]["deletionTimestamp"] = (now + timedelta(seconds=20)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert silent_since(PodView.of(raw), now) is None
    past = silent_since(PodView.of(raw), now + timedelta(seconds=90))
    assert past is not None and 69 <= past <= 71


def test_what_keeps_a_pod_from_starting_is_the_last_warning() -> None:
    view = PodView.of(pod("Pending", {"waiting": {"reason": "ContainerCreating"}}))
    events = [
        {"type": "Warning", "reason": "FailedMount", "message": "no such claim"},
        {"type": "Normal", "reason": "Pulled"},
    ]
    assert "after 9 s: FailedMount: no such claim; mend" in str(unstarted(view, events, 9.0))
    assert "after 9 s: ContainerCreating; mend" in str(unstarted(view, [], 9.0))


def test_last_words_are_the_error_not_the_records() -> None:
    assert last_words('Traceback\nerror: no store\n{"event": "step"}\nbye') == "error: no store"
    assert last_words('ValueError: x\n{"event": "step"}') == "ValueError: x"


def test_the_table_has_every_fault() -> None:
    lines = markdown_table().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == [
        *(each.name for each in FAULTS),
        *(name for name, *_ in QUIET),
    ]
    assert "`no node takes pod <pod> for <seconds> s: <scheduler>; make room" in lines[2]
    subclasses = {
        each for each in vars(faults).values() if isinstance(each, type) and issubclass(each, PodFault)
    }
    assert subclasses - {PodFault} == set(FAULTS)
