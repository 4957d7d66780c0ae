"""The other way: run launcher, executor and op tags of dagster-k8s, by its own pure functions."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
import kubernetes
import kubernetes_validate
import pytest
from dagster_k8s import k8s_job_executor
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job, get_user_defined_k8s_config

from resources.step_pods import executor, step_pod_tags
from tide_platform.config import ConfigError, Settings, load_settings


def settings(through: str = "executor", **trainer: Any) -> Settings:
    volume = {"claim": "tide-state", "path": "/shared"}
    raw = {"profile": "mi250", "image": "platform:1", "through": through, "gpus": 1, "volumes": [volume]}
    return Settings.model_validate({"cluster": {"trainer": raw | trainer}})


def step_job(of: Settings) -> dict[str, Any]:
    """The Job that k8s_job_executor makes of `draft_checkpoint`'s step."""
    tags = {name: json.dumps(value) for name, value in step_pod_tags(of).items()}
    launcher = DagsterK8sJobConfig(job_image="orchestrator:1", dagster_home="/dagster")
    job = construct_dagster_k8s_job(
        launcher, ["dagster", "api", "execute_step"], "step", get_user_defined_k8s_config(tags), "step-pod"
    )
    return kubernetes.client.ApiClient().sanitize_for_serialization(job)


def test_the_step_runs_in_the_trainers_pod() -> None:
    job = step_job(settings(secrets=["s3"]))
    assert kubernetes_validate.validate(job, "1.33", strict=True)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["nodeSelector"] == {"amd.com/gpu.device-id": "740c"}
    assert spec["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["securityContext"]["runAsNonRoot"] and job["spec"]["backoffLimit"] == 0
    assert container["image"] == "platform:1" and container["args"][1] == "api"
    assert container["resources"]["limits"]["amd.com/gpu"] == "1"
    assert {"name": "volume-0", "mountPath": "/shared", "readOnly": False} in container["volumeMounts"]
    assert {"secretRef": {"name": "s3"}} in container["envFrom"]
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]


def test_the_executor_is_chosen_by_the_setting_alone() -> None:
    assert executor(settings()) is k8s_job_executor
    for other in (Settings(), settings("pipes")):
        assert executor(other) is dg.in_process_executor and step_pod_tags(other) == {}


def test_one_step_is_one_process(tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text("cluster: {trainer: {profile: h100, image: i, through: executor}}")
    with pytest.raises(ConfigError, match=r"cluster.trainer: .*several need through: pipes"):
        load_settings(path, {})


def of(selector: dict[str, str]) -> K8sContainerContext:
    return K8sContainerContext.create_from_config(
        {"k8s": {"run_k8s_config": {"pod_spec_config": {"node_selector": selector}}}}
    )


def test_the_code_locations_node_selector_goes_before_the_launchers() -> None:
    """dagster#33900, as it is in the version installed: what the launcher says of the same label is lost, so
    the GPU nodes are named in `cluster.trainer` alone, whose tags go before both.
    """
    launcher, location = of({"pool": "gpu", "zone": "a"}), of({"pool": "cpu"})
    merged = launcher.merge(location).run_k8s_config
    assert merged.pod_spec_config == {"node_selector": {"pool": "cpu", "zone": "a"}}
    tags = {"dagster-k8s/config": json.dumps({"pod_spec_config": {"node_selector": {"pool": "trainer"}}})}
    with_tags = K8sContainerContext(run_k8s_config=get_user_defined_k8s_config(tags))
    last = launcher.merge(location).merge(with_tags).run_k8s_config
    assert last.pod_spec_config == {"node_selector": {"pool": "trainer", "zone": "a"}}
