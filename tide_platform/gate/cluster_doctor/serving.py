"""The cluster's doctor on SGLang's pods: found, ready, their plugin live, of one draft."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tide_platform.cluster.access import core_api
from tide_platform.cluster.discovery import ServingPod, serving_pods
from tide_platform.config import Settings
from tide_platform.config.cluster import Cluster
from tide_platform.gate.doctor import Finding

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


def serving(settings: Settings, cluster: Cluster, client: "ApiClient") -> Iterator[Finding]:
    if cluster.serving is None:
        return
    pods = serving_pods(cluster, core_api(client))
    if not pods:
        mend = "mend cluster.serving.selector or service, or start the servers"
        yield Finding("serving", "error", "no pod of SGLang's is found", mend)
        return
    ready = [pod for pod in pods if not pod.problem]
    yield from (_waits(cluster, pod) for pod in pods if pod.problem)
    expected = cluster.serving.expected
    text = f"{len(ready)} of {expected or len(pods)} servers are ready"
    if expected is not None and len(ready) != expected:
        grade = "error" if len(ready) < expected else "warn"
        mend = "no draft is rolled out while servers are missing" if len(ready) < expected else ""
        yield Finding("serving", grade, text, mend or "set cluster.serving.expected to them")
    else:
        yield Finding("serving", "ok", text)
    yield from _plugins(settings, ready)


def _waits(cluster: Cluster, pod: ServingPod) -> Finding:
    mend = f"kubectl -n {cluster.namespace} describe pod {pod.name}"
    return Finding("serving", "error", f"{pod.name}: {pod.problem}", mend)


def _plugins(settings: Settings, pods: list[ServingPod]) -> Iterator[Finding]:
    """Asked over the network that a rollout uses. Raises :class:`AdminKeyMissing`."""
    from tide_platform.serving.admin import read_admin_key
    from tide_platform.serving.client import SglangClient
    from tide_platform.serving.ready import not_ready

    key, drafts = read_admin_key(settings), set()
    for pod in pods:
        with SglangClient(str(pod.url), key, attempts=1) as client:
            reasons = list(not_ready(settings, client, ()))
            if not reasons and settings.serving.k:
                drafts.add(client.status()["draft_digest"])
        if reasons:
            mend = "read its log; a NetworkPolicy may be in the way"
            yield Finding("serving", "error", f"{pod.name} at {pod.url}: {'; '.join(reasons)}", mend)
        else:
            yield Finding("serving", "ok", f"{pod.name}: the plugin is live")
    if len(drafts) > 1:
        text = f"they serve different drafts: {', '.join(sorted(map(str, drafts)))}"
        yield Finding("serving", "warn", text, "the next tick of `watch_champion` brings one to all of them")
