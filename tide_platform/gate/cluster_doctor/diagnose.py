"""``tide doctor --cluster``: what of a cluster would not work, in plain words, each with its mend.

Nothing is changed but a probe object in the store and a probe file in the state folder, both removed.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tide_platform.cluster.access import (
    REQUEST_S,
    ClusterRefused,
    ClusterUnreachable,
    api_client,
    asking,
    core_api,
)
from tide_platform.cluster.rights import BY_SERVICE, DOCTOR, SERVING, TRAINER, Right
from tide_platform.config import Settings
from tide_platform.config.cluster import Cluster
from tide_platform.gate.doctor import Finding, guarded

if TYPE_CHECKING:
    from kubernetes.client import ApiClient


def diagnose_cluster(settings: Settings) -> Iterator[Finding]:
    """Everything that can be looked at from here; errors of one subject don't hide the next."""
    from tide_platform.gate.cluster_doctor import nodes, objects, serving, state

    cluster = settings.cluster
    if cluster is None:
        mend = "fill it in: docs/kubernetes.md"
        yield Finding("configuration", "error", "there is no `cluster` section", mend)
        return
    yield Finding("configuration", "ok", f"deployment {settings.deployment}, namespace {cluster.namespace}")
    with_api = list(guarded("api", partial(_api, cluster)))
    yield from with_api
    if all(finding.grade != "error" for finding in with_api):
        with api_client(cluster) as client:
            yield from guarded("rights", partial(rights, cluster, client))
            yield from guarded("claims", partial(objects.claims, settings, cluster, client))
            yield from guarded("secrets", partial(objects.secrets, cluster, client))
            yield from guarded("nodes", partial(nodes.nodes, cluster, client))
            yield from guarded("serving", partial(serving.serving, settings, cluster, client))
    yield from guarded("store", partial(state.store, settings))
    yield from guarded("state", partial(state.state, settings))


def _api(cluster: Cluster) -> Iterator[Finding]:
    from kubernetes.client import VersionApi

    with api_client(cluster) as client:
        api: Any = VersionApi(client)
        with asking("version"):
            version = api.get_code(_request_timeout=REQUEST_S).git_version
        yield Finding("api", "ok", f"Kubernetes {version} answers")
        try:
            with asking(f"namespace {cluster.namespace}"):
                core_api(client).list_namespaced_pod(cluster.namespace, limit=1, _request_timeout=REQUEST_S)
        except ClusterRefused as error:
            yield Finding("api", "error", str(error), "set cluster.namespace, or bind the chart's Role there")
        else:
            yield Finding("api", "ok", f"pods of namespace {cluster.namespace} may be listed")


def needed(cluster: Cluster) -> list[Right]:
    """Rights that this configuration makes use of."""
    found: dict[Right, None] = {}
    if cluster.trainer is not None:
        found |= dict.fromkeys([*TRAINER, *DOCTOR])
    if cluster.serving is not None:
        found |= dict.fromkeys(SERVING)
        if cluster.serving.service is not None:
            found |= dict.fromkeys(BY_SERVICE)
    return list(found)


def rights(cluster: Cluster, client: "ApiClient") -> Iterator[Finding]:
    """Each asked of the API itself (SelfSubjectAccessReview)."""
    wanted = needed(cluster)
    denied = [right for right in wanted if not _may(cluster, client, right)]
    if denied:
        text = f"this account may not: {', '.join(map(str, denied))}"
        mend = "run as the chart's account <release>-orchestrator, or bind its Role to this one"
        yield Finding("rights", "error", text, mend)
    else:
        yield Finding("rights", "ok", f"all {len(wanted)} rights that are needed")


def _may(cluster: Cluster, client: "ApiClient", right: Right) -> bool:
    from kubernetes import client as models

    asked = models.V1ResourceAttributes(
        namespace=cluster.namespace,
        group=right.group,
        resource=right.resource,
        subresource=right.subresource,
        verb=right.verb,
    )
    spec, api = models.V1SelfSubjectAccessReviewSpec(resource_attributes=asked), _authorization(client)
    with asking(f"whether this account may {right}"):
        review = api.create_self_subject_access_review(
            models.V1SelfSubjectAccessReview(spec=spec), _request_timeout=REQUEST_S
        )
    return bool(review.status.allowed)


def _authorization(client: "ApiClient") -> Any:
    from kubernetes.client import AuthorizationV1Api

    return AuthorizationV1Api(client)


def hidden(about: str, what: str, error: ClusterRefused | ClusterUnreachable, by_hand: str) -> Finding:
    """What this account may not see is no error of the cluster's. Raises ``error`` where it is another."""
    if not isinstance(error, ClusterRefused) or error.status not in (401, 403):
        raise error
    return Finding(about, "warn", f"{what}: this account may not look", f"look by hand: {by_hand}")
