"""The cluster's doctor on what pods refer to: claims and secrets."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tide_platform.cluster.access import REQUEST_S, ClusterRefused, asking, core_api
from tide_platform.config import Settings
from tide_platform.config.cluster import Cluster, Mount
from tide_platform.gate.cluster_doctor.diagnose import hidden
from tide_platform.gate.doctor import Finding

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_MANY = {"ReadWriteMany"}
_MANY_READERS = {"ReadWriteMany", "ReadOnlyMany"}


def claims(settings: Settings, cluster: Cluster, client: "ApiClient") -> Iterator[Finding]:
    """Of the trainer: there, bound, and mountable by several pods; one of them holds the state."""
    if cluster.trainer is None:
        return
    holds_state = [
        mount
        for mount in cluster.trainer.volumes
        if settings.state.is_relative_to(mount.path) and not mount.read_only
    ]
    if not holds_state:
        mend = "add the shared claim to cluster.trainer.volumes, at the path where runs see it"
        text = f"no writable volume of cluster.trainer.volumes holds {settings.state}, which jobs pass"
        yield Finding("claims", "error", text, mend)
    for mount in cluster.trainer.volumes:
        yield _claim(cluster, client, mount)


def _claim(cluster: Cluster, client: "ApiClient", mount: Mount) -> Finding:
    where = f"claim {mount.claim}"
    by_hand = f"kubectl -n {cluster.namespace} get pvc {mount.claim}"
    try:
        with asking(where):
            found = core_api(client).read_namespaced_persistent_volume_claim(
                mount.claim, cluster.namespace, _request_timeout=REQUEST_S
            )
    except ClusterRefused as error:
        if error.status == 404:
            mend = f"make it in {cluster.namespace}, or mend cluster.trainer.volumes"
            return Finding("claims", "error", f"{where}: there is none", mend)
        return hidden("claims", where, error, by_hand)
    return _judged(found, mount, where)


def _judged(found: Any, mount: Mount, where: str) -> Finding:
    modes = set(found.spec.access_modes or [])
    allowed = _MANY_READERS if mount.read_only else _MANY
    told = f"{where} at {mount.path}: {', '.join(sorted(modes))}, {found.status.phase}"
    if not modes & allowed:
        mend = (
            f"it needs {' or '.join(sorted(allowed))}: runs, trainers and servers mount it from several nodes"
        )
        return Finding("claims", "error", told, mend)
    if found.status.phase != "Bound":
        mend = "fine where its class binds with the first pod; else see `kubectl describe pvc`"
        return Finding("claims", "warn", told, mend)
    return Finding("claims", "ok", told)


def secrets(cluster: Cluster, client: "ApiClient") -> Iterator[Finding]:
    """Of the trainer's pods, pull secrets included: whether they are there. What they hold is not read."""
    trainer = cluster.trainer
    if trainer is None:
        return
    kinds = {name: "secret" for name in trainer.secrets}
    kinds |= {name: "pull secret" for name in trainer.image_pull_secrets}
    for name, kind in kinds.items():
        yield _secret(cluster, client, name, kind)


def _secret(cluster: Cluster, client: "ApiClient", name: str, kind: str) -> Finding:
    where = f"{kind} {name}"
    try:
        with asking(where):
            core_api(client).read_namespaced_secret(
                name, cluster.namespace, _preload_content=False, _request_timeout=REQUEST_S
            )
    except ClusterRefused as error:
        if error.status == 404:
            setting = "image_pull_secrets" if kind == "pull secret" else "secrets"
            mend = f"make it in {cluster.namespace}, or mend cluster.trainer.{setting}"
            return Finding("secrets", "error", f"{where}: there is none", mend)
        return hidden("secrets", where, error, f"kubectl -n {cluster.namespace} get secret {name}")
    return Finding("secrets", "ok", f"{where} is there")
