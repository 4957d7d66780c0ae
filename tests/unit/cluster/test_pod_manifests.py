"""Manifests of training pods: whole, as snapshots, valid for Kubernetes, and safe whatever the settings."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from syrupy.assertion import SnapshotAssertion

from tide_platform.cluster.manifests import GRACE_S, RunLabels, manifests, owner
from tide_platform.config.cluster import Cluster

VERSION = "1.33"
LABELS = RunLabels("demo", "w00001", "0123abcd-0000-4000-8000-000000000000")
JOB = Path("/shared/state/work/demo-w00001/job.json")
PROFILES: dict[str, dict[str, Any]] = {
    "mi250": {
        "profile": "mi250",
        "nodes": 2,
        "secrets": ["tide-s3"],
        "groups": [44, 109],
        "image_pull_secrets": ["registry"],
        "service_account": "tide-trainer",
        "priority_class": "training",
    },
    "h100": {"profile": "h100", "user": 10001},
    "cpu": {"profile": "cpu", "cpu": "2", "memory": "4Gi"},
}


def made(trainer: dict[str, Any], owners: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    volume = {"claim": "tide-state", "path": "/shared/state"}
    cluster = Cluster.model_validate(
        {"namespace": "tide", "trainer": {"image": "registry/tide-trainer:1", "volumes": [volume], **trainer}}
    )
    assert cluster.trainer is not None
    built = manifests(cluster, cluster.trainer, LABELS, 1, JOB, owners or [])
    return [each for each in (built.service, built.job, built.pod) if each is not None]


def spec_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    last = found[-1]
    return last["spec"] if last["kind"] == "Pod" else last["spec"]["template"]["spec"]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_manifests_are_these(profile: str, snapshot: SnapshotAssertion) -> None:
    assert made(PROFILES[profile]) == snapshot


@pytest.mark.parametrize("profile", PROFILES)
def test_kubernetes_takes_them(profile: str) -> None:
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": "run", "uid": "u"}]
    for manifest in made(PROFILES[profile], owners):
        assert kubernetes_validate.validate(manifest, VERSION, strict=True) == VERSION
        assert manifest["metadata"]["ownerReferences"] == owners


def test_a_mistake_would_be_found() -> None:
    (pod,) = made(PROFILES["cpu"])
    pod["spec"]["nodeSelectr"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize(
    ("trainer", "command"),
    [
        ({"profile": "cpu"}, "tide train --job /shared/state/work/demo-w00001/job.json"),
        (
            {"profile": "cpu", "processes": 2},
            "torchrun --nproc-per-node=2 --standalone --no-python tide train --job "
            "/shared/state/work/demo-w00001/job.json",
        ),
        (
            {"profile": "h100", "nodes": 2, "rendezvous_port": 29501, "schedule_timeout_s": 60},
            "torchrun --nproc-per-node=8 --nnodes=2 --node-rank=$(JOB_COMPLETION_INDEX) "
            "--master-addr=tide-w00001-0123abcd-1-0.tide-w00001-0123abcd-1 --master-port=29501 "
            "--rdzv-id=tide-w00001-0123abcd-1 --rdzv-conf=timeout=960 --no-python "
            "tide train --job /shared/state/work/demo-w00001/job.json",
        ),
    ],
    ids=["one process", "one pod", "two pods"],
)
def test_the_command_is_always_tide_train(trainer: dict[str, Any], command: str) -> None:
    assert " ".join(spec_of(made(trainer))["containers"][0]["command"]) == command


def test_torchrun_takes_the_command_of_several_pods_and_waits_as_long_as_they_may_start() -> None:
    """By torch's own reading of it: the rendezvous, its timeout, and until when workers may end."""
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

    (container,) = spec_of(made({"profile": "h100", "nodes": 2}))["containers"]
    argv = [each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in container["command"]]
    env = {each["name"]: each["value"] for each in container["env"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        config, command, rest = run.config_from_args(run.parse_args(argv[1:]))
    assert (command, rest[0]) == ("tide", "train")
    assert config.shutdown_timeout == GRACE_S - 10
    made_of = RendezvousParameters(
        config.rdzv_backend, config.rdzv_endpoint, config.run_id, 2, 2, **config.rdzv_configs
    )
    handler: Any = create_rdzv_handler(made_of)
    assert (handler.rank, handler.world_size, handler.timeout.total_seconds()) == (1, 2, 1800)
    assert handler.master_addr == "tide-w00001-0123abcd-1-0.tide-w00001-0123abcd-1"


@pytest.mark.parametrize("profile", PROFILES)
def test_no_setting_makes_a_pod_unsafe(profile: str) -> None:
    spec = spec_of(made(PROFILES[profile]))
    assert spec["securityContext"] | {"runAsNonRoot": True} == spec["securityContext"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
    secrets = [each["secretRef"]["name"] for each in spec["containers"][0]["envFrom"]]
    assert secrets == PROFILES[profile].get("secrets", [])  # by reference, no value in the manifest


def test_an_owner_is_a_pod_of_the_same_namespace() -> None:
    inside = {"POD_NAME": "run", "POD_UID": "u", "POD_NAMESPACE": "tide"}
    assert owner("tide", inside) == [{"apiVersion": "v1", "kind": "Pod", "name": "run", "uid": "u"}]
    assert owner("other", inside) == [] and owner("tide", {}) == []
