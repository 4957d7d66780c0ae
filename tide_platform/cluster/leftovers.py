"""Pods, Jobs and services that a run made, removed: its own at its end, others' that nobody will."""

import time
from collections.abc import Callable, Mapping

from tide_platform.cluster.api import KubeApi
from tide_platform.cluster.faults import ApiUnavailable, ManifestRefused, PodsRemain, TrainingStopped
from tide_platform.cluster.manifests import DEPLOYMENT_LABEL, GRACE_S, RUN_LABEL, WINDOW_LABEL

_SLACK_S = 30.0  # over the grace period, until a pod that is still there is left to Kubernetes


def remove(api: KubeApi, labels: Mapping[str, str]) -> list[str]:
    """Deletes all that carries the labels, a Job with its pods; the pods' names. They end in time."""
    for job in api.jobs(labels):
        api.delete("Job", job["metadata"]["name"])
    for service in api.services(labels):
        api.delete("Service", service["metadata"]["name"])
    names = [pod["metadata"]["name"] for pod in api.pods(labels)]
    for name in names:
        api.delete("Pod", name)
    return names


def remove_and_wait(
    api: KubeApi, labels: Mapping[str, str], say: Callable[[str], None], poll_s: float = 1.0
) -> None:
    """As :func:`remove`, and waits until the pods are gone, so that no two trainers are at one folder. One on
    a node that does not answer stays; that is said.
    """
    remove(api, labels)
    until = time.monotonic() + GRACE_S + _SLACK_S
    while left := [pod["metadata"]["name"] for pod in api.pods(labels)]:
        if time.monotonic() >= until:
            say(f"still being deleted, left to Kubernetes: {', '.join(left)}")
            return
        time.sleep(poll_s)


def remove_earlier(
    api: KubeApi,
    labels: Mapping[str, str],
    say: Callable[[str], None],
    stop: Callable[[], bool],
    patience_s: float,
    poll_s: float = 1.0,
) -> None:
    """As :func:`remove_and_wait`, before a run starts again: an API server that does not answer is waited
    for: the pods train on meanwhile, and a second trainer beside them would be refused by their lock.

    Raises :class:`PodsRemain`, :class:`TrainingStopped`.
    """
    until, told = time.monotonic() + patience_s, False
    while True:
        try:
            return remove_and_wait(api, labels, say)
        except ManifestRefused as error:
            raise PodsRemain(why=str(error)) from error
        except ApiUnavailable as error:
            if time.monotonic() >= until:
                raise PodsRemain(why=str(error)) from error
            if not told:
                say(f"{error}; the run's earlier pods are removed when it does, before others are started")
            told = True
        if stop():
            raise TrainingStopped
        time.sleep(poll_s)


def leftovers(
    api: KubeApi, deployment: str, alive: Callable[[str], bool], window: str | None = None
) -> dict[str, set[str]]:
    """Run id -> names of the pods, Jobs and services that runs left behind: the deployment's, of one window
    or of all, whose run is not ``alive``.
    """
    labels = {DEPLOYMENT_LABEL: deployment} | ({WINDOW_LABEL: window} if window else {})
    found: dict[str, set[str]] = {}
    for each in [*api.pods(labels), *api.jobs(labels), *api.services(labels)]:
        run_id = each["metadata"]["labels"].get(RUN_LABEL, "")
        if not alive(run_id):
            found.setdefault(run_id, set()).add(each["metadata"]["name"])
    return found


def remove_leftovers(
    api: KubeApi,
    deployment: str,
    alive: Callable[[str], bool],
    say: Callable[[str], None],
    window: str | None = None,
    wait: bool = True,
) -> None:
    """Removes them. ``alive(run id)`` is asked about each run found; ``wait``: until they are gone."""
    for run_id, names in leftovers(api, deployment, alive, window).items():
        say(f"removed {', '.join(sorted(names))} of run {run_id}, which left it behind")
        labels = {DEPLOYMENT_LABEL: deployment, RUN_LABEL: run_id}
        if wait:
            remove_and_wait(api, labels, say)
        else:
            remove(api, labels)
