"""The fake Kubernetes API behaves as the real one where training pods and their watcher rely on it."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakekube import FakeKube, Logs, fake_kube
from kubernetes import client, config
from kubernetes.client import ApiException


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeKube]:
    with fake_kube(tmp_path, {}) as made:
        yield made


@pytest.fixture
def api(fake: FakeKube) -> client.ApiClient:
    return config.new_client_from_config(str(fake.kubeconfig))


def pod(name: str, script: str, **meta: Any) -> dict[str, Any]:
    container = {"name": "c", "image": "i", "command": [sys.executable, "-c", script]}
    spec = {"restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **meta}, "spec": spec}


def indexed_job(script: str, **spec: Any) -> dict[str, Any]:
    template = pod("", script)["spec"] | {"subdomain": "net"}
    base = {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 0}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"},
        "spec": base | spec | {"template": {"metadata": {"labels": {"of": "job"}}, "spec": template}},
    }  # fmt: skip


def until(found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (it := found()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return it


def refused(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(ApiException) as error:
        call()
    return error.value.status or 0, str(error.value.body)


def test_an_invalid_manifest_is_refused(api: client.ApiClient) -> None:
    core = client.CoreV1Api(api)
    wrong = pod("p", "pass")
    wrong["spec"]["nodeSelectr"] = {}
    status, why = refused(lambda: core.create_namespaced_pod("default", wrong))
    assert status == 422 and "nodeSelectr" in why
    core.create_namespaced_pod("default", pod("p", "pass"))
    assert refused(lambda: core.create_namespaced_pod("default", pod("p", "pass")))[0] == 409
    assert refused(lambda: core.read_namespaced_pod("q", "default"))[0] == 404
    assert refused(lambda: core.delete_namespaced_pod("q", "default"))[0] == 404


def test_a_pod_runs_here_and_its_log_is_followed_with_times(api: client.ApiClient, fake: FakeKube) -> None:
    core = client.CoreV1Api(api)
    script = "import sys; print('one'); print('error: two', file=sys.stderr); sys.exit(3)"
    core.create_namespaced_pod("default", pod("p", script))
    assert refused(lambda: core.read_namespaced_pod_log("p", "default"))[0] == 400  # waits to start
    ended = until(lambda: core.read_namespaced_pod("p", "default").status.phase == "Failed")
    assert ended
    state = core.read_namespaced_pod("p", "default").status.container_statuses[0].state.terminated
    assert state.exit_code == 3 and "error: two" in state.message
    raw = core.read_namespaced_pod_log("p", "default", follow=True, timestamps=True, _preload_content=False)
    lines = raw.data.decode().splitlines()
    assert [line.split(" ", 1)[1] for line in sorted(lines)] and len({line[:30] for line in lines}) == 2
    fake.log("p").told = Logs(one_stamp=True)
    raw = core.read_namespaced_pod_log("p", "default", timestamps=True, _preload_content=False)
    assert len({line[:30] for line in raw.data.decode().splitlines()}) == 1


def test_selectors_of_labels_and_fields(api: client.ApiClient) -> None:
    core = client.CoreV1Api(api)
    for name in ("a", "b"):
        core.create_namespaced_pod("default", pod(name, "pass", labels={"name": name, "kind": "x"}))
    names = lambda **by: [each.metadata.name for each in core.list_namespaced_pod("default", **by).items]  # noqa: E731
    assert names(label_selector="kind=x,name=a") == ["a"] and names(label_selector="name!=a") == ["b"]
    assert names(field_selector="metadata.name=b") == ["b"] and names() == ["a", "b"]
    events = until(
        lambda: core.list_namespaced_event("default", field_selector="involvedObject.name=b").items
    )
    assert events[0].reason == "Scheduled"


def test_a_jobs_pods_know_their_index_and_each_others_addresses(
    api: client.ApiClient, fake: FakeKube
) -> None:
    core, batch = client.CoreV1Api(api), client.BatchV1Api(api)
    service = {"metadata": {"name": "net"}, "spec": {"clusterIP": "None", "selector": {"of": "job"}}}
    core.create_namespaced_service("default", service)
    script = (
        "import os, time; print(os.environ['JOB_COMPLETION_INDEX'], 'job-1.net.default.svc'); time.sleep(1)"
    )
    batch.create_namespaced_job("default", indexed_job(script))
    subsets = until(
        lambda: (
            (s := core.read_namespaced_endpoints("net", "default").subsets) and len(s[0].addresses) == 2 and s
        )
    )
    assert sorted(each.ip for each in subsets[0].addresses) == ["127.0.0.1", "127.0.0.2"]
    until(lambda: (batch.read_namespaced_job("job", "default").status.conditions or [None])[0])
    (condition,) = batch.read_namespaced_job("job", "default").status.conditions
    assert condition.type == "Complete"
    said = sorted(fake.log(name).text() for name in fake.pods())
    assert said == ["0 127.0.0.2", "1 127.0.0.2"]
    batch.delete_namespaced_job("job", "default")
    until(lambda: not fake.pods())


@pytest.mark.parametrize(("backoff", "pods"), [(0, 1), (2, 3)])
def test_a_job_fails_after_its_backoff_limit_and_is_gone_after_its_time(
    api: client.ApiClient, fake: FakeKube, backoff: int, pods: int
) -> None:
    batch = client.BatchV1Api(api)
    made = indexed_job(
        "import sys; sys.exit(1)", backoffLimit=backoff, completions=1, ttlSecondsAfterFinished=1
    )
    made["spec"]["parallelism"] = 1
    batch.create_namespaced_job("default", made)
    until(lambda: (batch.read_namespaced_job("job", "default").status or client.V1JobStatus()).conditions)
    assert len(fake.made) == pods
    until(lambda: not fake.left())
