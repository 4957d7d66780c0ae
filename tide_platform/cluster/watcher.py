"""Waits for the pods of one attempt, with timeouts that end it, and tells in words what becomes of them."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from tide_platform.cluster.api import KubeApi
from tide_platform.cluster.diagnose import (
    broken,
    disturbed,
    gone,
    gpu_memory,
    silent_since,
    unanswered,
    unscheduled,
    unstarted,
    with_failures,
    with_logs,
)
from tide_platform.cluster.failures import Failure
from tide_platform.cluster.faults import (
    ApiUnavailable,
    HostMemoryShort,
    NodeLost,
    OutOfMemory,
    PodDeleted,
    PodFault,
    Preempted,
    TrainerFailed,
    TrainingStopped,
    Unschedulable,
)
from tide_platform.cluster.pods import CONTAINER, PodView, Said

_T = TypeVar("_T")
LOG_LINES = 2000  # each process of a pod that loses a peer leaves a traceback of dozens


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    schedule: float  # until a node takes a pod
    start: float  # from there until it runs
    poll: float = 2.0
    # of several pods one that fails may only be the first to notice that another is lost: so long the others
    # are looked at before its own words are believed; a node that is lost is told of after 40 s
    settle: float = 60.0
    node: float = 60.0  # past a pod's deletion, or with phase Unknown, until its node is taken for lost
    api: float = 600.0  # without an answer of the API server; the pods train on meanwhile
    files: float = 10.0  # until a shared volume shows what trainers that failed wrote of it


@dataclass
class Watch:
    """``run()`` returns when the trainer of each of ``pods`` pods has ended well.

    ``on_start(name)`` is called once for each pod whose container has started, ``on_poll()`` every ``poll``
    seconds, ``say`` when a pod's state has changed. ``failures()``: what this attempt's trainers wrote of
    their errors, earliest first.
    """

    api: KubeApi
    labels: Mapping[str, str]
    pods: int
    limits: Limits
    say: Callable[[str], None]
    on_poll: Callable[[], None]
    stop: Callable[[], bool]
    on_start: Callable[[PodView], None] = lambda _: None
    failures: Callable[[], list[Failure]] = list
    processes: int = 1  # of each pod
    _seen: dict[str, PodView] = field(default_factory=dict)  # by name, as last seen
    _ended: dict[str, PodView] = field(default_factory=dict)  # well
    _since: dict[str, float] = field(default_factory=dict)  # "pod/what" -> when that was first seen
    _told: dict[str, str] = field(default_factory=dict)
    _silent: dict[str, float] = field(default_factory=dict)  # what is asked in vain -> since when
    _logs: dict[str, str] = field(default_factory=dict)  # by name, of a training that has failed: its end

    def run(self) -> None:
        """Raises the faults of :mod:`tide_platform.cluster.faults`, and :class:`TrainingStopped`."""
        while len(self._ended) < self.pods:
            if self.stop():
                raise TrainingStopped
            if (found := self._look()) is not None:
                for view in found.values():
                    self._tell(view)
                if (fault := self._patient("events", lambda of=found: self._fault(of))) is not None:
                    raise self._rooted(fault)
            self.on_poll()
            if len(self._ended) < self.pods:
                time.sleep(self.limits.poll)

    def _look(self) -> dict[str, PodView] | None:
        """The pods by name; None while the API server does not answer."""
        found = self._patient("pods", lambda: [PodView.of(each) for each in self.api.pods(self.labels)])
        return None if found is None else {view.name: view for view in found}

    def _patient(self, what: str, ask: Callable[[], _T]) -> _T | None:
        """The answer; None while the API server does not give it, for as long as that may last."""
        try:
            answer = ask()
        except ApiUnavailable as error:
            if time.monotonic() - self._silent.setdefault(what, time.monotonic()) > self.limits.api:
                raise
            self._say_once("api", f"{error}; the pods are watched again when it does")
            return None
        self._silent.pop(what, None)
        if not self._silent:
            self._told.pop("api", None)
        return answer

    def _pause(self) -> None:
        """Between two looks at pods that have failed."""
        if self.stop():
            raise TrainingStopped
        self.on_poll()
        time.sleep(self.limits.poll)

    def _tell(self, view: PodView) -> None:
        self._say_once(view.name, f"pod {view.name} {view.words()}")
        first = view.started and not (view.name in self._seen and self._seen[view.name].started)
        if first:
            self.on_start(view)

    def _fault(self, found: dict[str, PodView]) -> PodFault | None:
        """What is wrong with any pod, the root first; notes those that ended well."""
        faults = self._faults(found)
        if not found and not self._seen:
            return self._unmade()
        faults = self._not_by_job(faults) or faults
        return min(faults, key=_telling) if faults else None

    def _faults(self, found: dict[str, PodView]) -> list[PodFault]:
        """The pods' own faults, the earliest first, for its peers only followed; then pods that are gone."""
        own: list[tuple[str, int, PodFault]] = []
        for view in found.values():
            if view.ended is not None and view.ended.status == 0:
                self._ended[view.name] = view
            elif (fault := broken(view) or self._overdue(view)) is not None:
                own.append((view.ended.finished_at if view.ended else "", view.index, fault))
        lost = [
            self._gone(view)
            for name, view in self._seen.items()
            if name not in found and name not in self._ended
        ]
        self._seen |= found
        return [fault for *_, fault in sorted(own, key=lambda each: each[:2])] + lost

    def _not_by_job(self, faults: list[PodFault]) -> list[PodFault]:
        """Without the pods that the Job's controller deleted because another had failed."""
        if self.pods == 1 or not any(isinstance(each, PodDeleted) for each in faults):
            return faults
        time.sleep(self.limits.poll)  # the controller tells of a deletion a moment after it
        ended = self._ended_by_job()
        return [each for each in faults if each.values.get("pod") not in ended]

    def _overdue(self, view: PodView) -> PodFault | None:
        limits = self.limits
        past = silent_since(view, datetime.now(UTC))
        if past is not None and past > limits.node:
            return unanswered(view)
        if view.phase == "Unknown" and self._for(view, "unknown") > limits.node:
            return gone(view, [])
        if view.started or view.init_failed or view.deleted_at:
            return None
        if view.node is None:
            waited = self._for(view, "unscheduled")
            return unscheduled(view, self._events(view), waited) if waited > limits.schedule else None
        waited = self._for(view, "unstarted")
        return unstarted(view, self._events(view), waited) if waited > limits.start else None

    def _unmade(self) -> PodFault | None:
        """A Job whose pods are never made: quota, admission. Told as not scheduled."""
        waited = time.monotonic() - self._since.setdefault("/none", time.monotonic())
        if waited <= self.limits.schedule:
            return None
        names = [each["metadata"]["name"] for each in self.api.jobs(self.labels)]
        events = self.api.events(names[0]) if names else []
        words = events[-1].get("message", "") if events else "no pod was made"
        return Unschedulable(pod=f"of job {names[0]}" if names else "", seconds=waited, scheduler=words)

    def _gone(self, last: PodView) -> PodFault:
        return gone(last, self._events(last), self._job_end())

    def _job_end(self) -> Said | None:
        """Why the Job ended, where there is one: it tells of the pod that ended it."""
        for job in self.api.jobs(self.labels) if self.pods > 1 else []:
            for each in (job.get("status") or {}).get("conditions") or []:
                if each["type"] in ("Failed", "FailureTarget") and each["status"] == "True":
                    return Said(each.get("reason") or "", each.get("message") or "")
        return None

    def _ended_by_job(self) -> set[str]:
        """The pods that the Job's controller deleted because another had failed, as its events say."""
        events = [
            each for job in self.api.jobs(self.labels) for each in self.api.events(job["metadata"]["name"])
        ]
        told = " ".join(each["message"] for each in events if each.get("reason") == "SuccessfulDelete")
        return {name for name in self._seen if name in told.split()}

    def _rooted(self, fault: PodFault) -> PodFault:
        """The fault in the trainer's words; of several pods the one behind it, if one shows in time."""
        until = time.monotonic() + (self.limits.settle if self.pods > 1 else 0)
        while isinstance(fault, TrainerFailed) and time.monotonic() < until:
            # now: the Job's controller deletes the peers of a pod that failed, and their logs go with them
            self._keep_logs()
            if (found := self._look()) is not None:
                others = self._patient("events", lambda of=found: self._behind(of)) or []
                fault = min([fault, *others], key=_telling)
                if all(view.ended for view in found.values()):
                    break
            self._pause()
        return self._worded(fault) if isinstance(fault, TrainerFailed) else fault

    def _behind(self, found: dict[str, PodView]) -> list[PodFault]:
        """What may explain that a trainer failed: also pods that are being taken away, or have gone."""
        taken = [each for view in found.values() if (each := disturbed(view)) is not None]
        return self._not_by_job(self._faults(found) + taken)

    def _worded(self, fault: TrainerFailed) -> PodFault:
        """As the trainers' own files tell it, else as the logs of those that failed do."""
        until = time.monotonic() + self.limits.files
        while not (failures := self.failures()) and time.monotonic() < until:
            self._pause()
        told = with_failures(fault, failures, self._pod_of)
        if told is not None and not isinstance(told, TrainerFailed):
            return told
        failed = [view.name for view in self._seen.values() if view.ended and view.ended.status != 0]
        logs = {name: self._log(name) for name in dict.fromkeys([fault.pod, *failed, *self._logs])}
        return gpu_memory(logs) or told or with_logs(fault, logs)

    def _pod_of(self, rank: int) -> str | None:
        index = rank // self.processes
        return next((view.name for view in self._seen.values() if view.index == index), None)

    def _keep_logs(self) -> None:
        """Of all pods that were seen, as far as the API server answers: each is asked for again."""
        for pod in self._seen:
            with suppress(ApiUnavailable):
                if log := self.api.log_tail(pod, CONTAINER, LOG_LINES):
                    self._logs[pod] = log

    def _log(self, pod: str) -> str:
        """Its end, as kept where the pod is gone; empty where it cannot be had in time: a fault that is known
        is not lost for it.
        """
        until = time.monotonic() + self.limits.settle
        while True:
            try:
                return self.api.log_tail(pod, CONTAINER, LOG_LINES) or self._logs.get(pod, "")
            except ApiUnavailable as error:
                if time.monotonic() >= until:
                    self.say(f"the log of pod {pod} cannot be read: {error}")
                    return self._logs.get(pod, "")
            self._pause()

    def _events(self, view: PodView) -> list[dict]:
        return self.api.events(view.name)

    def _for(self, view: PodView, what: str) -> float:
        """Seconds since the pod was first seen so."""
        now = time.monotonic()
        return now - self._since.setdefault(f"{view.name}/{what}", now)

    def _say_once(self, about: str, words: str) -> None:
        if self._told.get(about) != words:
            self._told[about] = words
            self.say(words)


def _telling(fault: PodFault) -> int:
    """The lower, the closer to the root: what happened to a pod explains why its peers failed."""
    order = (OutOfMemory, HostMemoryShort, Preempted, NodeLost, PodDeleted, TrainerFailed)
    return order.index(type(fault)) if type(fault) in order else -1
