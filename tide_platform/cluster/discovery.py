"""Where SGLang's pods are: behind a headless service by DNS, or by their labels from the Kubernetes API."""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tide_platform.cluster.access import REQUEST_S, api_client, asking, core_api
from tide_platform.cluster.readiness import why_not_ready
from tide_platform.config import TideError
from tide_platform.config.cluster import Cluster, ServingPods

log = logging.getLogger("tide.cluster")


class ServersMissing(TideError):
    """Fewer servers are ready than there must be. ``waiting``: pod name -> why it is not ready."""

    def __init__(self, where: str, ready: int, wanted: int, waiting: dict[str, str]):
        told = "; ".join(f"{pod}: {why}" for pod, why in waiting.items())
        super().__init__(
            f"{where}: {ready} of {wanted} SGLang servers are ready ({told or 'there are no other pods'}); "
            "mend the pods, or set cluster.serving.expected to the servers there shall be"
        )
        self.where, self.ready, self.wanted, self.waiting = where, ready, wanted, dict(waiting)


@dataclass(frozen=True)
class ServingPod:
    """One of SGLang's pods. ``problem``: why it is not ready, empty where it is."""

    name: str
    url: str | None  # None: it has no address yet
    problem: str = ""


def serving_urls(cluster: Cluster) -> list[str]:
    """Base URLs of the servers that are ready now, in an order that stays. Servers may come and go between
    two calls.

    Raises :class:`ServersMissing` where there is none at all, and what :func:`serving_pods` does.
    """
    serving = _serving(cluster)
    urls, waiting = _ready_now(cluster, serving, 1)
    if not urls:
        raise ServersMissing(_where(cluster, serving), 0, serving.expected or 1, waiting)
    return urls


def require_servers(cluster: Cluster, found: int | None = None) -> None:
    """Raises :class:`ServersMissing` where fewer than ``cluster.serving.expected`` are ready: a rollout would
    leave the others out. ``found``: how many the rollout has, of those that were ready when it looked.
    """
    serving = _serving(cluster)
    if serving.expected is None or (found is not None and found >= serving.expected):
        return
    urls, waiting = _ready_now(cluster, serving, serving.expected)
    ready = len(urls) if found is None else min(len(urls), found)
    if ready < serving.expected:
        raise ServersMissing(_where(cluster, serving), ready, serving.expected, waiting)


def serving_pods(cluster: Cluster, core: Any = None) -> list[ServingPod]:
    """All pods behind ``cluster.serving``, ready or not, by name: of its selector, or of its service's own.
    ``core``: a ``CoreV1Api`` that is there already.

    Raises :class:`NoClusterAccess`, :class:`ClusterUnreachable`, :class:`ClusterRefused`.
    """
    serving = _serving(cluster)
    if core is None:
        with api_client(cluster) as client:
            return serving_pods(cluster, core_api(client))
    selector = serving.selector or _selector_of(cluster, str(serving.service), core)
    with asking(f"pods {selector} in {cluster.namespace}"):
        found = core.list_namespaced_pod(
            cluster.namespace, label_selector=selector, _request_timeout=REQUEST_S
        ).items
    return [_pod(each, serving.port) for each in sorted(found, key=_by_ordinal)]


def _ready_now(cluster: Cluster, serving: ServingPods, wanted: int) -> tuple[list[str], dict[str, str]]:
    """The servers that are ready, and why others are not; behind a service that is asked for only where fewer
    than ``wanted`` are.
    """
    if serving.service is None:
        pods = serving_pods(cluster)
        return [pod.url for pod in pods if pod.url is not None and not pod.problem], _waiting(pods)
    urls = _by_dns(cluster, serving)
    return urls, _waiting_behind(cluster, serving) if len(urls) < wanted else {}


def _by_dns(cluster: Cluster, serving: ServingPods) -> list[str]:
    """A headless service's name stands for the addresses of its ready pods."""
    host = _host(cluster, serving)
    try:
        found = socket.getaddrinfo(host, serving.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        log.info("%s: no address (%s)", host, error.strerror)
        return []
    addresses = sorted({str(address[0]) for *_, address in found})
    return [_url(address, serving.port) for address in addresses]


def _selector_of(cluster: Cluster, service: str, core: Any) -> str:
    name, _, rest = service.partition(".")
    namespace = rest.partition(".")[0] or cluster.namespace
    with asking(f"service {name} in {namespace}"):
        labels = core.read_namespaced_service(name, namespace, _request_timeout=REQUEST_S).spec.selector or {}
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _waiting_behind(cluster: Cluster, serving: ServingPods) -> dict[str, str]:
    """By the API where it may be asked: DNS tells of ready pods only."""
    try:
        return _waiting(serving_pods(cluster))
    except TideError as error:
        return {_where(cluster, serving): f"why cannot be told: {error}"}


def _pod(pod: Any, port: int) -> ServingPod:
    spec, name, address = pod.spec, pod.metadata.name, pod.status.pod_ip
    if address is None:
        return ServingPod(name, None, why_not_ready(pod) or "it has no address")
    if spec.hostname and spec.subdomain:  # a StatefulSet's pod keeps this name when its address changes
        address = f"{spec.hostname}.{spec.subdomain}.{pod.metadata.namespace}.svc"
    return ServingPod(name, _url(address, port), why_not_ready(pod))


def _by_ordinal(pod: Any) -> tuple[str, int, str]:
    """``tide-sglang-2`` before ``tide-sglang-10``."""
    name = pod.metadata.name
    stem, _, number = name.rpartition("-")
    return (stem, int(number), name) if number.isdigit() else (name, -1, name)


def _waiting(pods: Sequence[ServingPod]) -> dict[str, str]:
    return {pod.name: pod.problem for pod in pods if pod.problem}


def _host(cluster: Cluster, serving: ServingPods) -> str:
    service = str(serving.service)
    return service if "." in service else f"{service}.{cluster.namespace}.svc"


def _where(cluster: Cluster, serving: ServingPods) -> str:
    return _host(cluster, serving) if serving.service else f"{serving.selector} in {cluster.namespace}"


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _serving(cluster: Cluster) -> ServingPods:
    assert cluster.serving is not None
    return cluster.serving
