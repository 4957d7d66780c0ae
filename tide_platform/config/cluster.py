"""The ``cluster`` section: where pods train and serve (see docs/kubernetes.md).

Without it everything runs beside the Dagster run, as processes; with it the same deployment runs in pods.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tide_platform.config.section import Section

# settings of `cluster.trainer` that a profile gives; what the file says itself goes before
# eight processes of a pod have threads, a cache of samples and segments of shared memory each
_EIGHT_RANKS = {"cpu": "32", "memory": "256Gi", "shared_memory": "32Gi"}
PROFILES: dict[str, dict[str, Any]] = {
    "mi250": {
        "gpus": 8,  # an MI250 is two devices
        **_EIGHT_RANKS,
        "gpu_resource": "amd.com/gpu",
        "node_selector": {"amd.com/gpu.device-id": "740c"},
        "tolerations": [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "env": {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0", "HSA_FORCE_FINE_GRAIN_PCIE": "1"},
    },
    "h100": {
        "gpus": 8,
        **_EIGHT_RANKS,
        "gpu_resource": "nvidia.com/gpu",
        "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "env": {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"},
    },
    "cpu": {"gpus": 0},
}
_MERGED = ("env", "node_selector")  # settings whose entries are added to the profile's


class Toleration(Section):
    """As Kubernetes has it."""

    key: str | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Mount(Section):
    """A persistent volume claim in a trainer's pod."""

    claim: str
    path: Path  # where the pod sees it
    read_only: bool = False


class TrainerPods(Section):
    """The pods that `draft_checkpoint` trains in."""

    # defaults for a kind of node: GPU resource, how many, node selector, tolerations, communication
    profile: Literal["mi250", "h100", "cpu"]
    image: str  # of deployments/images, or one's own with the project in it
    # pipes: the run starts the pods; executor: Dagster's k8s_job_executor makes the step's own pod so, which
    # needs K8sRunLauncher and an image with the whole platform
    through: Literal["pipes", "executor"] = "pipes"
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    image_pull_secrets: list[str] = []
    nodes: int = Field(default=1, ge=1)  # pods of one training run
    gpus: int = Field(default=0, ge=0)  # of each pod; a process for each
    # of each pod, where it has no GPU
    processes: int = Field(default=1, ge=1)
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: dict[str, str] = {}
    tolerations: list[Toleration] = []
    cpu: str = "8"  # requested and granted
    memory: str = "64Gi"
    shared_memory: str = "8Gi"  # /dev/shm, for collective communication
    env: dict[str, str] = {}  # RCCL and NCCL mostly
    # Kubernetes secrets whose entries become variables: keys of the object store and the like
    secrets: list[str] = []
    # the folder `state` of this configuration must be on one of them, at the same path as in the Dagster run
    volumes: list[Mount] = []
    # the process's number; None: the image's own, which must not be root
    user: int | None = Field(default=None, ge=1)
    # further groups, by number: of `render` and `video` on AMD nodes, who own /dev/kfd and /dev/dri there
    groups: list[int] = []
    service_account: str | None = None
    priority_class: str | None = None
    rendezvous_port: int = Field(default=29500, ge=1, le=65535)
    # a pod that no node takes for so long is given up, with the scheduler's own words
    schedule_timeout_s: float = Field(default=900.0, gt=0)
    # a pod that has a node but has not started by then (image, volumes) is given up
    start_timeout_s: float = Field(default=900.0, gt=0)
    # lost pods (preempted, deleted, of a lost node) are started again, the run goes on where it was
    max_lost: int = Field(default=3, ge=0)
    # a run that ran out of memory is started again with micro-batches half as large, so many times
    max_shrinks: int = Field(default=2, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _from_profile(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("profile") not in PROFILES:
            return raw
        profile = PROFILES[raw["profile"]]
        merged = {name: {**profile.get(name, {}), **(raw.get(name) or {})} for name in _MERGED}
        return {**profile, **raw, **merged}

    @model_validator(mode="after")
    def _one_step_one_pod(self) -> Self:
        if self.through == "executor" and (self.nodes > 1 or self.processes_per_pod > 1):
            raise ValueError("through: executor trains in one process; several need through: pipes")
        return self

    @property
    def processes_per_pod(self) -> int:
        return self.gpus or self.processes


class ServingPods(Section):
    """How SGLang's pods are found. One way: a headless service's name, or a label selector."""

    service: str | None = None  # headless: its name resolves to each pod's address
    selector: str | None = None  # such as app.kubernetes.io/name=tide-sglang; asks the Kubernetes API
    port: int = Field(default=30000, ge=1, le=65535)
    expected: int | None = Field(default=None, ge=1)  # servers there must be; fewer stops a rollout

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.service is None) == (self.selector is None):
            raise ValueError("give either service or selector")
        return self


class Cluster(Section):
    """A Kubernetes cluster. None of the two parts needs the other."""

    namespace: str = "default"
    kubeconfig: Path | None = None  # None: the pod's own service account
    context: str | None = None  # of the kubeconfig
    trainer: TrainerPods | None = None  # None: training runs beside the Dagster run
    serving: ServingPods | None = None  # None: rollout.servers names them

    @model_validator(mode="after")
    def _context_of_a_file(self) -> Self:
        if self.context and self.kubeconfig is None:
            raise ValueError("context names one of a kubeconfig; set kubeconfig")
        return self
