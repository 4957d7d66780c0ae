"""What can become of training pods: for each fault what the user reads, and what the platform does.

The classes are the errors, and the rows of the table in docs/trainer-pods.md. No Kubernetes here.
"""

from enum import Enum
from string import Formatter
from typing import Any, ClassVar

from tide_platform.config import TideError


class Answer(Enum):
    """What the policy does about a fault."""

    AGAIN = "started again, up to `max_lost` times; training goes on from the last acknowledged step"
    SMALLER = "started again with `training.micro_batch_positions` halved, up to `max_shrinks` times"
    FINAL = "the run fails and its pods are removed; the ledger asks for the window's next attempt"


class PodFault(TideError):
    """A fault of training pods. ``text``: what the user reads, of the values that the error keeps."""

    name: ClassVar[str]  # as the table has it
    text: ClassVar[str]
    answer: ClassVar[Answer]

    def __init__(self, **values: Any):
        super().__init__(self.text.format(**values))
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


class Unschedulable(PodFault):
    name = "no node takes the pod"
    text = (
        "no node takes pod {pod} for {seconds:.0f} s: {scheduler}; make room for it, or change gpus, cpu, "
        "memory, node_selector or tolerations of cluster.trainer"
    )
    answer = Answer.FINAL


class ImagePullFailed(PodFault):
    name = "image cannot be pulled"
    text = (
        "pod {pod}: image {image} cannot be pulled ({reason}: {message}); mend image or "
        "image_pull_secrets of cluster.trainer"
    )
    answer = Answer.FINAL


class InitFailed(PodFault):
    name = "init container fails"
    text = (
        "pod {pod}: Init:Error, init container {container} ended with exit status {status}: {words}; it is "
        "not the platform's own: look for what adds it to pods of this namespace"
    )
    answer = Answer.FINAL


class NotStarted(PodFault):
    name = "pod does not start"
    text = (
        "pod {pod} has node {node} but has not started after {seconds:.0f} s: {why}; mend what it names (a "
        "volume, a secret), or raise cluster.trainer.start_timeout_s"
    )
    answer = Answer.FINAL


class OutOfMemory(PodFault):
    name = "out of memory"
    text = "pod {pod} ran out of memory ({how})"
    answer = Answer.SMALLER


class HostMemoryShort(PodFault):
    name = "out of host memory beside GPUs"
    text = (
        "pod {pod} ran out of its container's memory ({how}); a smaller micro-batch saves memory of the GPU "
        "only: raise cluster.trainer.memory"
    )
    answer = Answer.FINAL


class Preempted(PodFault):
    name = "preempted or evicted"
    text = "pod {pod} was taken from node {node} ({reason}: {message})"
    answer = Answer.AGAIN


class NodeLost(PodFault):
    name = "node lost"
    text = "node {node} of pod {pod} is lost ({reason}: {message})"
    answer = Answer.AGAIN


class PodDeleted(PodFault):
    name = "pod deleted"
    text = "pod {pod} was deleted while it trained, and not by this run"
    answer = Answer.AGAIN


class FolderHeld(PodFault):
    name = "folder held"
    text = (
        "an earlier trainer, on a node that cannot be reached, still holds the folder of the run: pod {pod}: "
        "{words}"
    )
    answer = Answer.AGAIN


class TrainerFailed(PodFault):
    name = "trainer fails"
    text = "tide train in pod {pod}: {how}: {words}; all that it printed is in the run's log"
    answer = Answer.FINAL


class ResultMissing(PodFault):
    name = "no result"
    text = (
        "tide train ended well, but {path} {what}: the pods and this run must see the same state folder; "
        "see to cluster.trainer.volumes"
    )
    answer = Answer.FINAL


class ManifestRefused(PodFault):
    name = "pod refused"
    text = (
        "the Kubernetes API refuses {what} ({status}): {message}; see to cluster.trainer, to quotas and "
        "admission rules of the namespace, and to this run's service account"
    )
    answer = Answer.FINAL


class ApiUnavailable(PodFault):
    name = "API server does not answer"
    text = (
        "the Kubernetes API at {host} does not answer: {message}; see to cluster.kubeconfig and to the server"
    )
    answer = Answer.AGAIN


class PodsRemain(PodFault):
    name = "earlier pods cannot be removed"
    text = (
        "pods of this run's earlier attempt may train still and cannot be removed, so none is started beside "
        "them: {why}"
    )
    answer = Answer.FINAL


class LostTooOften(TideError):
    """More pods were lost than ``cluster.trainer.max_lost`` allows. The cause is the last one."""

    def __init__(self, fault: PodFault, most: int):
        super().__init__(
            f"{fault}; given up after {most + 1} lost attempts (cluster.trainer.max_lost); what is "
            "acknowledged stays, the window's next attempt goes on from there"
        )
        self.fault, self.most = fault, most


class MemoryNotEnough(TideError):
    """Out of memory, and the micro-batch is as small as it may become."""

    def __init__(self, fault: PodFault, positions: int):
        super().__init__(
            f"{fault}, also with training.micro_batch_positions {positions}; raise cluster.trainer.memory, "
            "or lower training.max_length"
        )
        self.fault, self.positions = fault, positions


class TrainingStopped(TideError):
    """The run may not go on with its window; its pods were ended."""

    def __init__(self) -> None:
        super().__init__("the run lost its hold on the window; its pods were ended")


# what happens without an error: name, what the user sees, what the platform does
QUIET: tuple[tuple[str, str, str], ...] = (
    (
        "log lines merged or lost",
        "lines that are missing in the run's log, or Dagster's warning that no Pipes messages came",
        "nothing is read from logs: steps come from the journal `out/run/steps.jsonl`, the result from "
        "`result.json`, `tide.json` and the checkpoint's digest",
    ),
    (
        "run cancelled",
        "the run as canceled",
        "its pods are ended with their grace period, so that the step in hand is acknowledged",
    ),
    (
        "run killed, pod left behind",
        "`removed pod <pod> of run <run>, which left it behind` in the log of the next run, or of the sensor",
        "the window's next run removes it before it starts its own; so does the sensor, and Kubernetes where "
        "the run itself was a pod (ownerReferences)",
    ),
)

FAULTS: tuple[type[PodFault], ...] = (
    Unschedulable, ImagePullFailed, InitFailed, NotStarted, OutOfMemory, HostMemoryShort, Preempted, NodeLost,
    PodDeleted, FolderHeld, TrainerFailed, ResultMissing, ManifestRefused, ApiUnavailable, PodsRemain,
)  # fmt: skip


def markdown_table() -> str:
    """For docs/trainer-pods.md."""
    rows = [(each.name, f"`{_shown(each.text)}`", each.answer.value) for each in FAULTS]
    lines = ["| fault | what the user sees | what the platform does |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in (*rows, *QUIET))]) + "\n"


def _shown(text: str) -> str:
    parts = Formatter().parse(text)
    return "".join(before + (f"<{field}>" if field else "") for before, field, *_ in parts)
