"""The other way to training pods: dagster-k8s's executor, the step's own pod as `cluster.trainer` says."""

from typing import Any

import dagster as dg

from tide_platform.config import Settings
from tide_platform.config.cluster import TrainerPods

_OF_CONTAINER = ("image", "imagePullPolicy", "env", "envFrom", "resources", "securityContext", "volumeMounts")


def executor(settings: Settings) -> dg.ExecutorDefinition:
    """Of all jobs: a process for each step would pay the imports each time, so it is one; a pod for each
    where ``cluster.trainer.through`` is ``executor``.
    """
    if _step_pods(settings) is None:
        return dg.in_process_executor
    from dagster_k8s import k8s_job_executor

    return k8s_job_executor


def step_pod_tags(settings: Settings) -> dict[str, Any]:
    """Op tags of `draft_checkpoint`: empty where Pipes starts the pods, or there are none."""
    pods = _step_pods(settings)
    return {} if pods is None else {"dagster-k8s/config": step_pod_config(pods)}


def step_pod_config(pods: TrainerPods) -> dict[str, Any]:
    """The pod of the step, but for its command, which is Dagster's."""
    from tide_platform.cluster.manifests import pod_spec

    spec = pod_spec(pods, [])
    (container,) = spec.pop("containers")
    spec.pop("automountServiceAccountToken")  # the step asks Kubernetes nothing, its executor's worker may
    config = {name: container[name] for name in _OF_CONTAINER if container.get(name)}
    return {"container_config": config, "pod_spec_config": spec, "job_spec_config": {"backoffLimit": 0}}


def _step_pods(settings: Settings) -> TrainerPods | None:
    pods = settings.cluster.trainer if settings.cluster else None
    return pods if pods is not None and pods.through == "executor" else None
