"""The cluster's doctor on nodes: whether the trainer's pods would find a place, GPUs included."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tide_platform.cluster.access import REQUEST_S, ClusterRefused, asking, core_api
from tide_platform.config.cluster import Cluster, Toleration, TrainerPods
from tide_platform.gate.cluster_doctor.diagnose import hidden
from tide_platform.gate.doctor import Finding

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

_BARS = ("NoSchedule", "NoExecute")


def nodes(cluster: Cluster, client: "ApiClient") -> Iterator[Finding]:
    """How many pods of the trainer the cluster has room for when nothing else runs there."""
    trainer = cluster.trainer
    if trainer is None:
        return
    selector = ",".join(f"{key}={value}" for key, value in sorted(trainer.node_selector.items()))
    where = f"nodes {selector}" if selector else "nodes"
    try:
        with asking(where):
            found = core_api(client).list_node(label_selector=selector, _request_timeout=REQUEST_S).items
    except ClusterRefused as error:
        yield hidden(
            "nodes", where, error, f"kubectl get nodes -l '{selector}' (or set rbac.nodes in the chart)"
        )
        return
    yield judge(trainer, found, where)


def judge(trainer: TrainerPods, found: Sequence[Any], where: str) -> Finding:
    """``found``: the ``V1Node`` that have the trainer's labels."""
    if not found:
        mend = "mend cluster.trainer.node_selector; an autoscaler that starts from none is not seen from here"
        return Finding("nodes", "error", f"{where}: there are none", mend)
    open_to_us = [
        node for node in found if not node.spec.unschedulable and not _barred(node, trainer.tolerations)
    ]
    if not open_to_us:
        taints = {f"{taint.key}:{taint.effect}" for node in found for taint in node.spec.taints or []}
        told = ", ".join(sorted(taints)) or "none"
        text = f"{where}: {len(found)}, and none takes the trainer (taints {told})"
        return Finding("nodes", "error", text, "add cluster.trainer.tolerations, or uncordon the nodes")
    if not trainer.gpus:
        return Finding("nodes", "ok", f"{where}: {len(open_to_us)} take the trainer")
    counts = [int((node.status.allocatable or {}).get(trainer.gpu_resource, 0)) for node in open_to_us]
    places = sum(count // trainer.gpus for count in counts)
    text = (
        f"{where}: {len(open_to_us)} take the trainer, with {sum(counts)} {trainer.gpu_resource}: room "
        f"for {places} pods of {trainer.gpus}, a run has {trainer.nodes}"
    )
    if not sum(counts):
        mend = f"install the device plugin of {trainer.gpu_resource}, or mend cluster.trainer.gpu_resource"
        return Finding("nodes", "error", text, mend)
    if places < trainer.nodes:
        return Finding("nodes", "error", text, "lower cluster.trainer.gpus or nodes, or add nodes")
    return Finding("nodes", "ok", text)


def _barred(node: Any, tolerations: Sequence[Toleration]) -> bool:
    taints = [taint for taint in node.spec.taints or [] if taint.effect in _BARS]
    return any(not any(_tolerates(each, taint) for each in tolerations) for taint in taints)


def _tolerates(toleration: Toleration, taint: Any) -> bool:
    """As the scheduler has it: an empty key tolerates all, an empty effect every effect."""
    if toleration.effect is not None and toleration.effect != taint.effect:
        return False
    if toleration.key is None:
        return toleration.operator == "Exists"
    if toleration.key != taint.key:
        return False
    return toleration.operator == "Exists" or (toleration.value or "") == (taint.value or "")
