"""A pod as the Kubernetes API tells of it, reduced to what a training run must know."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

CONTAINER = "trainer"  # of each training pod; others are not ours and not waited for
ATTEMPT_LABEL = "tide/attempt"


@dataclass(frozen=True)
class Said:
    """A reason and its message, as Kubernetes writes them."""

    reason: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" if self.message else self.reason


@dataclass(frozen=True)
class Ended:
    """A container that ended."""

    status: int
    reason: str  # Completed, Error, OOMKilled, ...
    message: str  # its last lines, where the kubelet kept them
    finished_at: str


@dataclass(frozen=True)
class PodView:
    name: str
    uid: str
    index: int  # of the training's pods; 0 where there is one
    phase: str
    node: str | None
    unschedulable: Said | None
    disrupted: Said | None  # condition DisruptionTarget
    unready: Said | None  # condition Ready, where the node does not answer
    own: Said | None  # of the pod itself: Evicted, NodeLost, ...
    waiting: Said | None  # of its container
    image: str
    running: bool
    ended: Ended | None
    init_failed: tuple[str, Ended] | None
    deleted_at: datetime | None  # when its deletion began to be due, the grace period included
    gpus: bool = False  # whether its container has any

    @property
    def started(self) -> bool:
        return self.running or self.ended is not None

    @classmethod
    def of(cls, pod: dict[str, Any]) -> "PodView":
        """``pod``: the API's JSON."""
        meta, status, spec = pod["metadata"], pod.get("status") or {}, pod["spec"]
        conditions = {each["type"]: each for each in status.get("conditions") or []}
        ours = next(
            (each for each in status.get("containerStatuses") or [] if each["name"] == CONTAINER), None
        )
        state = (ours or {}).get("state") or {}
        annotations = (meta.get("annotations") or {}) | (meta.get("labels") or {})
        return cls(
            name=meta["name"],
            uid=meta.get("uid", ""),
            index=int(annotations.get("batch.kubernetes.io/job-completion-index", 0)),
            phase=status.get("phase", "Pending"),
            node=spec.get("nodeName"),
            unschedulable=_condition(conditions, "PodScheduled", "False"),
            disrupted=_condition(conditions, "DisruptionTarget", "True"),
            unready=_condition(conditions, "Ready", "Unknown") or _silent(conditions.get("Ready")),
            own=Said(status["reason"], status.get("message") or "") if status.get("reason") else None,
            waiting=_said(state.get("waiting")),
            image=next((each["image"] for each in spec["containers"] if each["name"] == CONTAINER), "?"),
            running="running" in state,
            ended=_ended(state.get("terminated")),
            init_failed=_init_failed(status.get("initContainerStatuses") or []),
            deleted_at=_time(meta.get("deletionTimestamp")),
            gpus=_gpus(spec["containers"]),
        )

    def words(self) -> str:
        """Where it stands, for the run's log."""
        if self.init_failed:
            return "init container failed"
        if self.ended:
            return f"ended with exit status {self.ended.status} ({self.ended.reason})"
        if self.deleted_at:
            return f"is being deleted{f' ({self.disrupted})' if self.disrupted else ''}"
        if self.running:
            return f"runs on node {self.node}"
        if self.unschedulable:
            return f"waits for a node: {self.unschedulable.message or self.unschedulable.reason}"
        if self.node is None:
            return "waits for a node"
        return f"starts on node {self.node}{f': {self.waiting}' if self.waiting else ''}"


def _condition(conditions: dict[str, Any], kind: str, status: str) -> Said | None:
    found = conditions.get(kind)
    return _said(found) if found and found["status"] == status else None


def _silent(ready: dict[str, Any] | None) -> Said | None:
    """A pod of a node that stopped answering is marked not ready by the node's controller."""
    return _said(ready) if ready and ready.get("reason") in ("NodeNotReady", "NodeStatusUnknown") else None


def _said(raw: dict[str, Any] | None) -> Said | None:
    return Said(raw.get("reason") or "no reason given", raw.get("message") or "") if raw is not None else None


def _ended(raw: dict[str, Any] | None) -> Ended | None:
    if raw is None:
        return None
    return Ended(
        raw["exitCode"], raw.get("reason") or "", raw.get("message") or "", raw.get("finishedAt") or ""
    )


def _init_failed(statuses: list[dict[str, Any]]) -> tuple[str, Ended] | None:
    for each in statuses:
        ended = _ended((each.get("state") or {}).get("terminated"))
        if ended is not None and ended.status != 0:
            return each["name"], ended
    return None


def _gpus(containers: list[dict[str, Any]]) -> bool:
    """Resources of device plugins are named by a domain, Kubernetes' own are not."""
    ours = next((each for each in containers if each["name"] == CONTAINER), {})
    return any("/" in name for name in (ours.get("resources") or {}).get("limits") or {})


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
