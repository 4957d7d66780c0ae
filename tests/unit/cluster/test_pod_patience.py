"""The API server is silent while something else is being found out."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tide_platform.cluster import faults
from tide_platform.cluster.api import KubeApi
from tide_platform.cluster.faults import ApiUnavailable, ManifestRefused, TrainingStopped
from tide_platform.cluster.leftovers import remove_earlier
from tide_platform.cluster.manifests import RunLabels
from tide_platform.cluster.run import PodTraining
from tide_platform.cluster.watcher import LOG_LINES, Limits, Watch
from tide_platform.config.cluster import Cluster, TrainerPods

NO_ANSWER = ApiUnavailable(host="h", message="refused")
RUNNING: dict[str, Any] = {"running": {}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}
FAILED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "error: no peer", "finishedAt": "t"}}


def pod(index: int, state: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": f"p{index}", "labels": {"batch.kubernetes.io/job-completion-index": str(index)}},
        "spec": {"nodeName": "n", "containers": [{"name": "trainer", "image": "i"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]},
    }


class Script:
    """Each question has its answers in order, the last one for good; an exception is raised."""

    def __init__(self, **answers: list[Any]):
        self._answers = {
            "pods": [[]],
            "jobs": [[]],
            "services": [[]],
            "events": [[]],
            "log_tail": [""],
        } | answers
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.asked.append((name, *arguments))
            answers = self._answers[name]
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


def watched(
    api: Script,
    pods: int = 1,
    stop: Callable[[], bool] = lambda: False,
    patience: float = 5.0,
    **limits: float,
) -> list[str]:
    said: list[str] = []
    made = Limits(
        **{"schedule": 5, "start": 5, "poll": 0.01, "settle": 0.3, "api": patience, "files": 0} | limits
    )
    Watch(api, {}, pods, made, said.append, lambda: None, stop).run()  # type: ignore[arg-type]
    return said


def test_events_of_a_pod_that_is_gone_are_asked_for_again() -> None:
    preempted = [{"reason": "Preempted", "message": "by p9"}]
    api = Script(pods=[[pod(0, RUNNING)], []], events=[NO_ANSWER, NO_ANSWER, preempted])
    with pytest.raises(faults.Preempted, match="by p9"):
        watched(api)
    with pytest.raises(ApiUnavailable):
        watched(Script(pods=[[pod(0, RUNNING)], []], events=[NO_ANSWER]), patience=0.05)


def test_the_end_of_a_job_is_asked_for_again() -> None:
    condition = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "m"}
    ended = [{"metadata": {"name": "j"}, "status": {"conditions": [condition]}}]
    both = [pod(0, RUNNING), pod(1, RUNNING)]
    with pytest.raises(faults.Preempted, match="PodFailurePolicy: m"):
        watched(Script(pods=[both, both[:1]], jobs=[NO_ANSWER, ended]), pods=2)


def test_the_log_of_a_pod_that_failed_is_asked_for_again_and_not_for_ever() -> None:
    api = Script(pods=[[pod(0, FAILED)]], log_tail=[NO_ANSWER, "error: no store"])
    with pytest.raises(faults.TrainerFailed, match="error: no store"):
        watched(api)
    assert ("log_tail", "p0", "trainer", LOG_LINES) in api.asked
    with pytest.raises(faults.TrainerFailed, match="error: no peer"):
        watched(Script(pods=[[pod(0, FAILED)]], log_tail=[NO_ANSWER]), settle=0.05)


def test_a_run_that_must_stop_does_so_while_a_fault_is_looked_into_and_the_api_is_silent() -> None:
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 3

    api = Script(pods=[[pod(0, FAILED), pod(1, RUNNING)], NO_ANSWER])
    with pytest.raises(TrainingStopped):
        watched(api, pods=2, stop=stop, settle=30)
    assert len([each for each in api.asked if each[0] == "pods"]) <= 5  # with a pause between them


def test_a_peer_that_has_gone_explains_a_failure() -> None:
    both = [pod(0, RUNNING), pod(1, RUNNING)]
    api = Script(pods=[both, [pod(0, FAILED), pod(1, RUNNING)], [pod(0, FAILED)]])
    with pytest.raises(faults.PodDeleted, match="pod p1 was deleted"):
        watched(api, pods=2)


def test_a_peer_that_the_job_ended_for_the_failure_does_not_explain_it() -> None:
    ending = pod(1, RUNNING)
    ending["metadata"]["deletionTimestamp"] = "2100-01-01T00:00:00Z"
    told = [{"reason": "SuccessfulDelete", "message": "Deleted pod: p1"}]
    api = Script(
        pods=[[pod(0, FAILED), ending]] * 3 + [[pod(0, FAILED)]],
        jobs=[[{"metadata": {"name": "j"}}]],
        events=[told],
    )
    with pytest.raises(faults.TrainerFailed, match="error: no peer"):
        watched(api, pods=2)


@pytest.mark.parametrize("seen_first", [0, 1])
def test_the_pod_whose_log_says_why_is_told_whichever_was_seen_to_fail_first(seen_first: int) -> None:
    lost_peer = {"terminated": {"exitCode": 1, "reason": "Error", "message": "=====", "finishedAt": "t"}}
    both = [pod(0, FAILED), pod(1, lost_peer)]
    other = pod(1 - seen_first, RUNNING)
    logs = {"p0": "error: no store\nTraceback\n=====", "p1": "Connection closed by peer\n====="}
    api = Script(pods=[[both[seen_first], other], both])
    api.log_tail = lambda name, *_: logs[name]  # type: ignore[attr-defined]
    with pytest.raises(faults.TrainerFailed, match=r"pod p0: .*: error: no store"):
        watched(api, pods=2)


LOST_PEER = {"terminated": {"exitCode": 1, "reason": "Error", "message": "=====", "finishedAt": "t"}}


def test_a_log_is_kept_of_a_pod_that_the_job_then_deletes() -> None:
    """The follower is seen to fail first: the Job's controller deletes the leader, whose log says why."""
    logs = {"p0": "error: no store\nTraceback", "p1": "Connection closed by peer\n====="}
    follower = pod(1, LOST_PEER)
    told = [{"reason": "SuccessfulDelete", "message": "Deleted pod: p0"}]
    api = Script(
        pods=[[pod(0, RUNNING), follower], [follower]], jobs=[[{"metadata": {"name": "j"}}]], events=[told]
    )

    def log_tail(name: str, *_: Any) -> str:
        said = logs[name]
        logs["p0"] = ""  # it is gone before anyone asks again
        return said

    api.log_tail = log_tail  # type: ignore[attr-defined]
    with pytest.raises(faults.TrainerFailed, match=r"pod p0: failed first: error: no store"):
        watched(api, pods=2)


def test_a_pod_that_was_told_to_end_is_not_why_its_peer_failed() -> None:
    logs = {"p0": "error: SIGTERM: stopped after step 3 of 8", "p1": "Segmentation fault"}
    api = Script(pods=[[pod(0, RUNNING), pod(1, LOST_PEER)], [pod(0, FAILED), pod(1, LOST_PEER)]])
    api.log_tail = lambda name, *_: logs[name]  # type: ignore[attr-defined]
    with pytest.raises(faults.TrainerFailed, match=r"pod p1: exit status 1: Segmentation fault"):
        watched(api, pods=2)


def test_earlier_pods_are_removed_once_the_api_answers() -> None:
    said: list[str] = []
    api: Any = Script(jobs=[NO_ANSWER, NO_ANSWER, []], pods=[[pod(0, RUNNING)], []], delete=[None])
    remove_earlier(api, {}, said.append, lambda: False, 5.0, 0.01)
    assert ("delete", "Pod", "p0") in api.asked and len(said) == 1
    for error in (NO_ANSWER, ManifestRefused(what="this request", status=403, message="forbidden")):
        with pytest.raises(faults.PodsRemain) as remain:
            remove_earlier(Script(jobs=[error]), {}, said.append, lambda: False, 0.02, 0.01)  # type: ignore[arg-type]
        assert remain.value.answer is faults.Answer.FINAL and str(error) in str(remain.value)
    with pytest.raises(TrainingStopped):
        remove_earlier(Script(jobs=[NO_ANSWER]), {}, said.append, lambda: True, 5.0, 0.01)  # type: ignore[arg-type]


def test_a_refused_removal_does_not_hide_why_the_run_failed() -> None:
    said: list[str] = []
    refused = ManifestRefused(what="this request", status=401, message="Unauthorized")
    api: Any = Script(jobs=[refused])
    pods = TrainerPods.model_validate({"profile": "cpu", "image": "i"})
    training = PodTraining(Cluster(), pods, api, RunLabels("d", "w", "r"), lambda _: None, said.append)
    with pytest.raises(faults.OutOfMemory), training._removed():
        raise faults.OutOfMemory(pod="p", how="OOMKilled")
    assert "could not be removed" in said[0]
    with pytest.raises(ManifestRefused), training._removed():
        pass


@pytest.mark.parametrize(("status", "silent"), [(500, True), (429, True), (404, False), (400, False)])
def test_a_log_that_is_not_to_be_had_now_is_told_from_one_that_is_not_there(
    tmp_path: Path, status: int, silent: bool
) -> None:
    from kubernetes.client import ApiException

    def read(*_: Any, **__: Any) -> Any:
        raise ApiException(status=status, reason="r")

    path = tmp_path / "kubeconfig"
    path.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {}}], "
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:9'}}], "
        "contexts: [{name: c, context: {cluster: k, user: u}}]}"
    )
    with KubeApi(Cluster(kubeconfig=path)) as api:
        api._core = SimpleNamespace(read_namespaced_pod_log=read)  # type: ignore[assignment]
        if silent:
            with pytest.raises(ApiUnavailable):
                api.log_tail("p", "trainer")
        else:
            assert api.log_tail("p", "trainer") == ""
