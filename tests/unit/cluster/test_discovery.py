"""Serving pods by DNS and by labels, and what is said of those that are missing."""

import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from resources.cycle import Cycle
from tests.unit.cluster.api_stub import Core, pod, refusal
from tide_platform.cluster import discovery as module
from tide_platform.cluster.access import ClusterRefused, ClusterUnreachable
from tide_platform.cluster.discovery import ServersMissing, require_servers, serving_pods, serving_urls
from tide_platform.config import Settings
from tide_platform.config.cluster import Cluster, ServingPods
from tide_platform.serving.fleet import addresses, require_all

LABELS = "app.kubernetes.io/component=sglang"


def by_labels(expected: int | None = None) -> Cluster:
    return Cluster(namespace="tide", serving=ServingPods(selector=LABELS, expected=expected))


def by_name(service: str = "tide-sglang", expected: int | None = None) -> Cluster:
    return Cluster(namespace="tide", serving=ServingPods(service=service, expected=expected))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    core = Core()
    monkeypatch.setattr(module, "api_client", lambda cluster: nullcontext())
    monkeypatch.setattr("kubernetes.client.CoreV1Api", lambda client: core)
    return core


def resolves_to(monkeypatch: pytest.MonkeyPatch, *found: str) -> list[str]:
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_ready_pods_by_label_in_the_order_of_their_numbers(core: Core) -> None:
    core.pods = [
        pod("tide-sglang-10", address="10.0.0.10"),
        pod("tide-sglang-2", address="10.0.0.2"),
        pod("tide-sglang-0", address="10.0.0.3", ready=False),
        pod("tide-sglang-1", address="10.0.0.4", deleted=True),
        pod("tide-sglang-3", address="fd00::3"),
    ]
    urls = serving_urls(by_labels())
    assert urls == ["http://10.0.0.2:30000", "http://[fd00::3]:30000", "http://10.0.0.10:30000"]
    assert core.selectors == [LABELS]


def test_a_stateful_pod_goes_by_its_name_which_outlives_its_address(core: Core) -> None:
    core.pods = [pod("tide-sglang-0", stateful=True)]
    assert serving_urls(by_labels()) == ["http://tide-sglang-0.tide-sglang.tide.svc:30000"]


def test_a_headless_service_stands_for_its_ready_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolves_to(monkeypatch, "10.0.0.7", "10.0.0.5", "10.0.0.7")
    assert serving_urls(by_name()) == ["http://10.0.0.5:30000", "http://10.0.0.7:30000"]
    assert serving_urls(by_name("sglang.prod.svc.cluster.local"))
    assert asked == ["tide-sglang.tide.svc", "sglang.prod.svc.cluster.local"]


def test_fewer_than_expected_are_named_with_their_reasons(core: Core) -> None:
    core.pods = [
        pod("tide-sglang-0"),
        pod("tide-sglang-1", ready=False, waiting="CrashLoopBackOff"),
        pod("tide-sglang-2", ready=False, address=None, unschedulable="0/9 nodes: Insufficient amd.com/gpu"),
    ]
    with pytest.raises(ServersMissing) as error:
        require_servers(by_labels(expected=3))
    assert (error.value.ready, error.value.wanted) == (1, 3)
    assert error.value.waiting == {
        "tide-sglang-1": "sglang: CrashLoopBackOff",
        "tide-sglang-2": "Unschedulable: 0/9 nodes: Insufficient amd.com/gpu",
    }
    require_servers(by_labels(expected=1))
    require_servers(by_labels())
    core.pods = [pod("tide-sglang-0"), pod("tide-sglang-1")]
    with pytest.raises(ServersMissing, match="1 of 2"):  # the second came after the rollout had looked
        require_servers(by_labels(expected=2), found=1)
    core.pods = core.pods[:1]
    assert serving_urls(by_labels(expected=3)) == ["http://10.0.0.1:30000"], "a watcher goes on with the one"


def test_behind_a_service_the_api_names_those_that_dns_leaves_out(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolves_to(monkeypatch)
    core.pods = [pod("tide-sglang-0", ready=False)]
    with pytest.raises(ServersMissing) as error:
        serving_urls(by_name())
    assert error.value.waiting == {"tide-sglang-0": "sglang: runs, its probe says not ready"}
    assert core.selectors == ["app=sglang,release=r"]
    core.error = refusal(403, "services is forbidden")
    with pytest.raises(ServersMissing, match=r"why cannot be told.*services is forbidden"):
        require_servers(by_name(expected=2))


def test_what_the_api_refuses_is_typed(core: Core) -> None:
    core.error = refusal(403, "pods is forbidden")
    with pytest.raises(ClusterRefused, match="pods is forbidden; give the service account that right"):
        serving_pods(by_labels())


def test_an_api_that_does_not_answer_is_typed(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {}}],"
        " clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}],"
        " contexts: [{name: c, context: {cluster: c, user: u}}]}"
    )
    cluster = by_labels()
    cluster.kubeconfig = kubeconfig
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        serving_urls(cluster)


def test_the_fleet_asks_the_cluster_where_there_is_one(core: Core) -> None:
    settings = Settings()
    settings.rollout.servers = ["http://by-hand:1/"]
    assert addresses(settings) == ["http://by-hand:1"]
    require_all(settings)
    settings.cluster = by_labels(expected=2)
    core.pods = [pod("tide-sglang-0")]
    assert addresses(settings) == ["http://10.0.0.1:30000"]
    with pytest.raises(ServersMissing):
        require_all(settings)


def test_a_watcher_of_an_empty_cluster_says_so(
    core: Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(state=tmp_path, cluster=by_labels())
    monkeypatch.setenv("TIDE_ADMIN_KEY", "key")
    monkeypatch.setattr(Cycle, "settings", lambda self: settings)
    look = Cycle().look_after(None)  # type: ignore[arg-type]
    assert not look.mend and "0 of 1 SGLang servers are ready" in look.message
