"""Manifests of a training run's pods, as plain dicts: pure functions of the configuration."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.cluster.labels import TRAINER
from tide_platform.cluster.pods import ATTEMPT_LABEL, CONTAINER
from tide_platform.config.cluster import Cluster, Toleration, TrainerPods

Json = dict[str, Any]
DEPLOYMENT_LABEL, WINDOW_LABEL, RUN_LABEL = "tide/deployment", "tide/window", "tide/run"
PROFILE_LABEL = "tide/profile"
GRACE_S = 120  # between SIGTERM and SIGKILL: the step in hand is acknowledged
TTL_S = 3600  # of a Job that nobody removed
_INDEX = "$(JOB_COMPLETION_INDEX)"  # the kubelet puts the pod's number there


@dataclass(frozen=True)
class RunLabels:
    """Whose pods they are."""

    deployment: str
    window: str
    run_id: str

    def of_run(self) -> dict[str, str]:
        return {DEPLOYMENT_LABEL: self.deployment, WINDOW_LABEL: self.window, RUN_LABEL: self.run_id}

    def of_attempt(self, number: int) -> dict[str, str]:
        return self.of_run() | {ATTEMPT_LABEL: str(number)}

    def all(self, number: int) -> dict[str, str]:
        return self.of_attempt(number) | {
            **TRAINER,
            "app.kubernetes.io/instance": self.deployment,
            "app.kubernetes.io/part-of": "tide-platform",
            "app.kubernetes.io/managed-by": "tide-platform",
        }

    def name(self, number: int) -> str:
        """Of what an attempt makes."""
        return f"tide-{self.window}-{self.run_id[:8]}-{number}"


def owner(namespace: str, environ: Mapping[str, str] = os.environ) -> list[Json]:
    """ownerReferences to the pod that this process runs in, from the downward API (``POD_NAME``, ``POD_UID``,
    ``POD_NAMESPACE``): what the run left behind goes when its pod goes. Empty outside, or in another
    namespace, where Kubernetes would remove the dependents at once.
    """
    name, uid = environ.get("POD_NAME"), environ.get("POD_UID")
    if not (name and uid) or environ.get("POD_NAMESPACE") != namespace:
        return []
    return [{"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}]


def command(pods: TrainerPods, job: Path, name: str) -> list[str]:
    """``tide train --job FILE``, under torchrun where it has several processes. ``name``: of the Job and its
    service.
    """
    train = ["tide", "train", "--job", str(job)]
    if pods.nodes == 1 and pods.processes_per_pod == 1:
        return train
    launcher = ["torchrun", f"--nproc-per-node={pods.processes_per_pod}"]
    if pods.nodes == 1:
        return [*launcher, "--standalone", "--no-python", *train]
    # the pods start as their images and volumes let them: as long wait those that came first
    wait = round(pods.schedule_timeout_s + pods.start_timeout_s)
    return [
        *launcher,
        f"--nnodes={pods.nodes}",
        # static: pod 0 is told that it is the first, where c10d finds out by resolving its own name, which a
        # DNS that answers too early makes wrong for as long as it remembers
        f"--node-rank={_INDEX}",
        f"--master-addr={host(name, 0)}",
        f"--master-port={pods.rendezvous_port}",
        f"--rdzv-id={name}",
        f"--rdzv-conf=timeout={wait}",
        "--no-python",
        *train,
    ]


def host(name: str, index: int) -> str:
    """The name of an Indexed Job's pod, by its headless service."""
    return f"{name}-{index}.{name}"


def pod_spec(pods: TrainerPods, argv: list[str]) -> Json:
    resources: Json = {"cpu": pods.cpu, "memory": pods.memory}
    if pods.gpus:
        resources[pods.gpu_resource] = str(pods.gpus)
    # caches of compilers and of the GPU's libraries go below HOME
    env = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    if pods.nodes > 1 or pods.processes_per_pod > 1:
        # torchrun's own 30 s are too short for a step in hand; it must still end before the pod does
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_S - 10)
    env |= pods.env
    container: Json = {
        "name": CONTAINER,
        "image": pods.image,
        "imagePullPolicy": pods.image_pull_policy,
        "command": argv,
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "envFrom": [{"secretRef": {"name": name}} for name in pods.secrets],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # the kubelet keeps the log's end in the pod's status: last words without reading logs
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *(
                {"name": f"volume-{i}", "mountPath": str(mount.path), "readOnly": mount.read_only}
                for i, mount in enumerate(pods.volumes)
            ),
        ],
    }
    security: Json = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if pods.user is not None:
        security["runAsUser"] = pods.user
    if pods.groups:
        security["supplementalGroups"] = list(pods.groups)
    spec: Json = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security,
        "containers": [container],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": pods.shared_memory}},
            *(
                {
                    "name": f"volume-{i}",
                    "persistentVolumeClaim": {"claimName": mount.claim, "readOnly": mount.read_only},
                }
                for i, mount in enumerate(pods.volumes)
            ),
        ],
    }
    optional = {
        "nodeSelector": dict(pods.node_selector),
        "tolerations": [_toleration(each) for each in pods.tolerations],
        "imagePullSecrets": [{"name": name} for name in pods.image_pull_secrets],
        "serviceAccountName": pods.service_account,
        "priorityClassName": pods.priority_class,
    }
    return spec | {name: value for name, value in optional.items() if value}


def _toleration(of: Toleration) -> Json:
    raw = {"key": of.key, "operator": of.operator, "value": of.value, "effect": of.effect}
    return {name: value for name, value in raw.items() if value is not None}


@dataclass(frozen=True)
class Manifests:
    """Of one attempt. ``pod`` where it is one, else ``service`` and ``job``."""

    name: str
    labels: dict[str, str]
    pod: Json | None
    service: Json | None
    job: Json | None


def manifests(
    cluster: Cluster, pods: TrainerPods, labels: RunLabels, attempt: int, job: Path, owners: list[Json]
) -> Manifests:
    """``job``: the job's file, at the same path in the pods."""
    name, own = labels.name(attempt), labels.all(attempt) | {PROFILE_LABEL: pods.profile}
    meta: Json = {"name": name, "namespace": cluster.namespace, "labels": own}
    if owners:
        meta["ownerReferences"] = owners
    spec = pod_spec(pods, command(pods, job, name))
    if pods.nodes == 1:
        pod: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        return Manifests(name, own, pod, None, None)
    service: Json = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "selector": labels.of_attempt(attempt),
            # the pods look for each other before any of them is ready
            "publishNotReadyAddresses": True,
            "ports": [{"name": "rendezvous", "port": pods.rendezvous_port}],
        },
    }
    training: Json = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.nodes,
            "parallelism": pods.nodes,
            "backoffLimit": 0,
            # the Job's own status then tells a preemption, also when the pod is gone
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
                ]
            },
            "ttlSecondsAfterFinished": TTL_S,
            "template": {"metadata": {"labels": own}, "spec": spec | {"subdomain": name}},
        },
    }
    return Manifests(name, own, None, service, training)
