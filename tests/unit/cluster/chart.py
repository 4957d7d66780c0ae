"""The chart as real Helm renders it, taken apart for the tests."""

import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deployments" / "helm" / "tide"
FILES = ("mi250-mi300x", "h100", "dev")
WORKLOADS = ("Deployment", "StatefulSet", "Job", "Pod")
NAMESPACE = RELEASE = "tide"

# what the values files leave open: the other way of every switch of the chart
VARIANTS: dict[str, dict[str, Any]] = {
    "official": {
        "orchestrator": {"mode": "official"},
        "mlflow": {"enabled": False, "trackingUri": "http://m"},
    },
    "shared": {
        "state": {"claim": "own-state"},
        "secrets": {"notify": "tide-notify"},
        "rbac": {"nodes": True},
        "networkPolicy": {"pages": [{"podSelector": {}}], "clients": [{"podSelector": {}}]},
        "sglang": {"python": "/usr/bin/python3"},
    },
}


@dataclass(frozen=True)
class PodTemplate:
    """A pod that the chart makes, or that a run of the code location becomes."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    claims: frozenset[str] = frozenset()  # of a StatefulSet's templates

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def values_of(name: str) -> dict[str, Any]:
    """Of a values file, or of a variant."""
    if name in VARIANTS:
        return copy.deepcopy(VARIANTS[name])
    return yaml.safe_load((CHART / f"values-{name}.yaml").read_text())


ALL = (*FILES, *VARIANTS)


@cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """Every object, in the order of the files."""
    return tuple(render(values_of(name)))


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [each for each in rendered(name) if each["kind"] == kind]


def named(name: str, kind: str, ending: str) -> dict[str, Any]:
    (found,) = [each for each in of_kind(name, kind) if each["metadata"]["name"] == f"tide-{ending}"]
    return found


def pods(name: str) -> list[PodTemplate]:
    """Of all workloads, and of a run where runs are pods."""
    found = []
    for each in rendered(name):
        if each["kind"] not in WORKLOADS:
            continue
        template = each if each["kind"] == "Pod" else each["spec"]["template"]
        claims = frozenset(c["metadata"]["name"] for c in each["spec"].get("volumeClaimTemplates", []))
        full = f"{each['kind']}/{each['metadata']['name']}"
        found.append(PodTemplate(full, template["metadata"]["labels"], template["spec"], claims))
    job = run_job(name)
    template = job["spec"]["template"]
    return [*found, PodTemplate("Job/run", template["metadata"]["labels"], template["spec"])]


@cache
def run_context(name: str) -> dict[str, Any]:
    """What the code location tells of a run's pod."""
    (code,) = named(name, "Deployment", "code")["spec"]["template"]["spec"]["containers"]
    env = {each["name"]: each["value"] for each in code["env"]}
    return json.loads(env["DAGSTER_CLI_API_GRPC_CONTAINER_CONTEXT"])


@cache
def run_job(name: str) -> dict[str, Any]:
    """The Job that dagster-k8s makes of a run, from the launcher's configuration and the code location's."""
    from dagster_k8s.container_context import K8sContainerContext
    from dagster_k8s.job import DagsterK8sJobConfig, construct_dagster_k8s_job
    from kubernetes.client import ApiClient

    config = DagsterK8sJobConfig(
        job_image="tide/orchestrator:0.1.0",
        dagster_home="/opt/dagster/dagster_home",
        instance_config_map="tide-dagster" if name != "official" else None,
        postgres_password_secret=None,
    )
    context = K8sContainerContext.create_from_config(run_context(name))
    job = construct_dagster_k8s_job(
        config,
        args=["dagster", "api", "execute_run"],
        job_name="dagster-run-1",
        user_defined_k8s_config=context.run_k8s_config,
        component="run_worker",
    )
    with ApiClient() as client:
        return client.sanitize_for_serialization(job)


def settings_yaml(name: str) -> str:
    return named(name, "ConfigMap", "config")["data"]["tide.yaml"]
