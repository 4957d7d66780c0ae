"""Which fault a pod's state amounts to."""

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from tide_platform.cluster.failures import GPU_MEMORY, LOCK_HELD, Failure
from tide_platform.cluster.faults import (
    FolderHeld,
    HostMemoryShort,
    ImagePullFailed,
    InitFailed,
    NodeLost,
    NotStarted,
    OutOfMemory,
    PodDeleted,
    PodFault,
    Preempted,
    TrainerFailed,
    Unschedulable,
)
from tide_platform.cluster.pods import PodView, Said

_PULL = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
# words of a registry after which no further pull helps
_NO_USE = re.compile(r"not found|manifest unknown|unauthorized|denied|invalid reference", re.IGNORECASE)
_OF_A_NODE = {
    "NodeLost", "DeletionByTaintManager", "DeletionByPodGC", "NodeNotReady", "NodeStatusUnknown",
    "TaintManagerEviction",
}  # fmt: skip
_OF_A_PREEMPTION = {"Preempted", "Evicted", "EvictionByEvictionAPI", "PodFailurePolicy"}
_GPU_MEMORY = re.compile(r"OutOfMemoryError|(CUDA|HIP) out of memory")
_TOLD_TO_END = re.compile(r"error: SIG(TERM|INT):")  # as cli/train says it
_BY_SIGNAL = 128
MAX_WORDS = 500  # characters of a container's last words
FAILED_FIRST = "failed first"  # of a pod whose peer was seen to fail before it


def broken(view: PodView) -> PodFault | None:
    """Of a pod that is there: what ended it, or keeps it from ever starting; None: nothing did.

    ``TrainerFailed.words`` is what the kubelet kept of the log.
    """
    if view.own is not None and view.own.reason in _OF_A_NODE:
        return _node_lost(view, view.own)
    disturbed = view.disrupted or (view.own if view.phase == "Failed" else None)
    if view.phase == "Failed" and disturbed is not None:
        return _taken(view, disturbed)
    if view.init_failed is not None:
        container, ended = view.init_failed
        words = last_words(ended.message)
        return InitFailed(pod=view.name, container=container, status=ended.status, words=words)
    if view.ended is not None and view.ended.status != 0:
        return _of_exit(view)
    if view.waiting is not None and view.waiting.reason in _PULL:
        never = view.waiting.reason in ("InvalidImageName", "ErrImageNeverPull")
        if never or _NO_USE.search(view.waiting.message):
            return _image(view, view.waiting)
    return None


def silent_since(view: PodView, now: datetime) -> float | None:
    """For how many seconds a pod is past its deletion, grace included; None: it is not being deleted, or has
    time left. Its node does not answer then, for a kubelet ends pods in time.
    """
    if view.deleted_at is None or view.ended is not None:
        return None
    past = (now - view.deleted_at).total_seconds()
    return past if past > 0 else None


def unanswered(view: PodView) -> NodeLost:
    """Of a pod whose node let its deletion pass."""
    said = view.disrupted or view.unready or Said("deletion passed", "the node does not end the pod")
    return _node_lost(view, said)


def disturbed(view: PodView) -> PodFault | None:
    """Of a pod that is being taken away, or whose node is silent, though it has not ended."""
    if view.disrupted is not None:
        return _taken(view, view.disrupted)
    if view.ended is not None:
        return None
    if view.unready is not None:
        return unanswered(view)
    return PodDeleted(pod=view.name) if view.deleted_at is not None else None


def gone(last: PodView, events: Sequence[dict[str, Any]], job_end: Said | None = None) -> PodFault:
    """Of a pod that is not there any more, by how it was seen last, its events and how its Job ended."""
    said = [last.disrupted, last.own, last.unready]
    said += [Said(each.get("reason") or "", each.get("message") or "") for each in reversed(events)]
    said += [Said("Unknown", "the pod's state was not known any more") if last.phase == "Unknown" else None]
    said += [job_end]
    for each in said:
        if each is not None and (each.reason in _OF_A_NODE or each.reason == "Unknown"):
            return _node_lost(last, each)
        if each is not None and (each is last.disrupted or each.reason in _OF_A_PREEMPTION):
            return _taken(last, each)
    return PodDeleted(pod=last.name)


def unscheduled(view: PodView, events: Sequence[dict[str, Any]], seconds: float) -> Unschedulable:
    told = [each for each in events if each.get("reason") == "FailedScheduling"]
    words = view.unschedulable.message if view.unschedulable else ""
    words = words or (told[-1].get("message") if told else "") or "the scheduler has said nothing about it"
    return Unschedulable(pod=view.name, seconds=seconds, scheduler=words)


def unstarted(view: PodView, events: Sequence[dict[str, Any]], seconds: float) -> PodFault:
    if view.waiting is not None and view.waiting.reason in _PULL:
        return _image(view, view.waiting)
    warned = [each for each in events if each.get("type") == "Warning"]
    why = str(view.waiting) if view.waiting and view.waiting.message else ""
    if warned:
        why = str(Said(warned[-1].get("reason") or "", warned[-1].get("message") or ""))
    why = why or (str(view.waiting) if view.waiting else "its container has no state yet")
    return NotStarted(pod=view.name, node=view.node, seconds=seconds, why=why)


def last_words(text: str) -> str:
    """The line of a log's end that says why: the last that begins with ``error:``, else the last that is no
    record.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    plain = [line for line in lines if not line.startswith("{")]
    errors = [line for line in plain if line.startswith("error:")]
    return ((errors or plain or ["it said nothing"])[-1])[:MAX_WORDS]


def gpu_memory(logs: Mapping[str, str]) -> OutOfMemory | None:
    """Whether any pod's log tells that a GPU's memory did not suffice: of several the one that fails first
    need not be the one whose log says why. ``logs``: by pod.
    """
    for pod, log in logs.items():
        if found := _GPU_MEMORY.search(log):
            return OutOfMemory(pod=pod, how=f"the GPU's: {found.group(0)}")
    return None


def with_logs(fault: TrainerFailed, logs: Mapping[str, str]) -> TrainerFailed:
    """The fault in the words of a log's end, where there is one: a log that says ``error:`` goes before one
    that does not, which is a peer's that only lost its connection, or was told to end. ``logs``: by pod,
    ``fault.pod`` first.
    """
    words = {pod: last_words(log) for pod, log in logs.items() if log}
    telling = (
        pod for pod, said in words.items() if said.startswith("error:") and not _TOLD_TO_END.match(said)
    )
    pod = next(telling, fault.pod)
    how = fault.how if pod == fault.pod else FAILED_FIRST
    return TrainerFailed(pod=pod, how=how, words=words.get(pod, fault.words))


def with_failures(
    fault: TrainerFailed, failures: Sequence[Failure], pod_of: Callable[[int], str | None]
) -> PodFault | None:
    """The fault as the trainers' own files tell it, None where there are none. ``failures``: earliest first;
    ``pod_of``: rank -> name of its pod.
    """
    for each in failures:
        if each.kind == GPU_MEMORY:
            how = f"the GPU's, rank {each.rank}: {each.text[:MAX_WORDS]}"
            return OutOfMemory(pod=pod_of(each.rank) or fault.pod, how=how)
    if not failures:
        return None
    first = failures[0]
    pod, words = pod_of(first.rank) or fault.pod, first.text[:MAX_WORDS]
    if first.kind == LOCK_HELD:
        return FolderHeld(pod=pod, words=words)
    how = fault.how if pod == fault.pod else FAILED_FIRST
    return TrainerFailed(pod=pod, how=how, words=f"error: {words}")


def _of_exit(view: PodView) -> PodFault:
    assert view.ended is not None
    status, reason, message = view.ended.status, view.ended.reason, view.ended.message
    if view.disrupted is not None:
        return _taken(view, view.disrupted)
    if reason == "OOMKilled":
        fault = HostMemoryShort if view.gpus else OutOfMemory
        return fault(pod=view.name, how=f"OOMKilled, exit status {status}")
    # whatever the status: torchrun ends with 1 on SIGTERM, with a traceback
    if view.deleted_at is not None:
        return PodDeleted(pod=view.name)
    how = f"exit status {status}"
    if _BY_SIGNAL < status < _BY_SIGNAL + signal.NSIG:
        how += f" ({signal.Signals(status - _BY_SIGNAL).name})"
    words = last_words(message)
    return gpu_memory({view.name: message}) or TrainerFailed(pod=view.name, how=how, words=words)


def _taken(view: PodView, said: Said) -> PodFault:
    if said.reason in _OF_A_NODE:
        return _node_lost(view, said)
    return Preempted(pod=view.name, node=view.node or "unknown", reason=said.reason, message=said.message)


def _node_lost(view: PodView, said: Said) -> NodeLost:
    return NodeLost(pod=view.name, node=view.node or "unknown", reason=said.reason, message=said.message)


def _image(view: PodView, said: Said) -> ImagePullFailed:
    return ImagePullFailed(pod=view.name, image=view.image, reason=said.reason, message=said.message)
