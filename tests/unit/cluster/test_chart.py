"""The chart: linted, valid for Kubernetes, and giving configurations that the platform reads."""

import copy
import json
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.unit.cluster.chart import (
    ALL,
    CHART,
    FILES,
    ROOT,
    named,
    of_kind,
    render,
    rendered,
    run_context,
    run_job,
    settings_yaml,
    values_of,
)
from tide_platform.cluster.labels import TRAINER
from tide_platform.config import load_settings
from tide_platform.serving.preflight import check_settings, check_verify_rule

OLDEST, NEWEST = "1.28", "1.37"  # kubeVersion of Chart.yaml, and the newest that can be checked against
RULE = ("alert", "record", "expr", "for", "labels", "annotations")
# of the Prometheus operator (monitoring.coreos.com/v1): the parts that the chart uses, closed
OPERATOR: dict[str, Any] = {
    "ServiceMonitor": {
        "required": ["selector", "endpoints"],
        "additionalProperties": False,
        "properties": {
            "selector": {
                "required": ["matchLabels"],
                "additionalProperties": False,
                "properties": {"matchLabels": {}},
            },
            "namespaceSelector": {
                "properties": {"matchNames": {"type": "array"}},
                "additionalProperties": False,
            },
            "endpoints": {
                "type": "array",
                "items": {
                    "required": ["port"],
                    "additionalProperties": False,
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"type": "string"},
                        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                        "scrapeTimeout": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                        "relabelings": {
                            "items": {
                                "required": ["targetLabel", "replacement"],
                                "minProperties": 2,
                                "maxProperties": 2,
                            }
                        },
                    },
                },
            },
        },
    },
    "PrometheusRule": {
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {
            "groups": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "required": ["name", "rules"],
                    "properties": {
                        "rules": {
                            "items": {
                                "required": ["expr"],
                                "additionalProperties": False,
                                "properties": {key: {} for key in RULE},
                            }
                        }
                    },
                },
            }
        },
    },
}


@pytest.mark.parametrize("name", ALL)
def test_helm_finds_no_fault(name: str) -> None:
    told = helm_python.lint(str(CHART), values_of(name), strict=True, kube_version=f"v{NEWEST}.0")
    assert told["errors"] == [] and [m["error"] for m in told["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(name: str, version: str) -> None:
    objects = [*rendered(name), run_job(name)]
    assert len(objects) > 25
    for each in objects:
        if each["kind"] in OPERATOR:
            Draft202012Validator(OPERATOR[each["kind"]]).validate(each["spec"])
        else:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("fault", ["nodeSelectr", "replicas"])
def test_the_validation_finds_faults(fault: str) -> None:
    broken = copy.deepcopy(named("h100", "StatefulSet", "sglang"))
    if fault == "replicas":
        broken["spec"]["replicas"] = "two"
    else:
        broken["spec"]["template"]["spec"][fault] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, NEWEST, strict=True)


@pytest.mark.parametrize("name", ALL)
def test_the_configuration_is_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text(settings_yaml(name))
    settings = load_settings(path, {})
    check_settings(settings)
    check_verify_rule(settings, "0.5.14")
    cluster, given = settings.cluster, values_of(name)
    assert cluster is not None and cluster.trainer is not None and cluster.serving is not None
    assert cluster.namespace == "tide" and cluster.kubeconfig is None
    assert cluster.serving.expected == given.get("sglang", {}).get("replicas", 1)
    assert cluster.trainer.profile == given.get("trainer", {}).get("profile", "h100")
    assert settings.serving.host == settings.metrics.host == "0.0.0.0"
    state = [mount for mount in cluster.trainer.volumes if mount.path == settings.state]
    assert [mount.read_only for mount in state] == [False], "the contract of cluster.trainer.volumes"
    assert "files" not in settings.metrics.parts


@pytest.mark.parametrize("name", ALL)
def test_the_selector_of_discovery_matches_the_servers(name: str) -> None:
    cluster = yaml.safe_load(settings_yaml(name))["cluster"]
    wanted = dict(pair.split("=") for pair in cluster["serving"]["selector"].split(","))
    labels = named(name, "StatefulSet", "sglang")["spec"]["template"]["metadata"]["labels"]
    assert wanted.items() <= labels.items()


@pytest.mark.parametrize(
    ("config", "servers_restart"),
    [({"training": {"learning_rate": 1e-4}}, False), ({"capture": {"sampling_rate": 0.5}}, True)],
)
def test_servers_restart_for_what_they_read_alone(config: dict[str, Any], servers_restart: bool) -> None:
    sums = []
    for values in ({"config": {}}, {"config": config}):
        templates = {
            d["metadata"]["name"]: d["spec"]["template"]
            for d in render(values)
            if "template" in d.get("spec", {})
        }
        sums.append([templates[f"tide-{name}"]["metadata"]["annotations"] for name in ("sglang", "code")])
    (server, code), (server_after, code_after) = sums
    assert (server != server_after) == servers_restart and code != code_after


def test_numbers_and_nothing_pass_through_helm(tmp_path: Path) -> None:
    values = {"config": {"capture": {"ring_bytes": 268435456}, "serving": {"max_total_tokens": None}}}
    (config,) = [
        d for d in render(values) if d["kind"] == "ConfigMap" and d["metadata"]["name"] == "tide-config"
    ]
    (tmp_path / "tide.yaml").write_text(config["data"]["tide.yaml"])
    settings = load_settings(tmp_path / "tide.yaml", {})
    assert settings.capture.ring_bytes == 268435456 and settings.serving.max_total_tokens is None


@pytest.mark.parametrize("name", [*FILES, "shared"])
def test_dagster_takes_its_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster._config import process_config
    from dagster._core.instance.config import dagster_instance_config_schema
    from dagster_k8s import K8sRunLauncher

    data = named(name, "ConfigMap", "dagster")["data"]
    instance = yaml.safe_load(data["dagster.yaml"])
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", "postgresql://host/dagster")
    config = process_config(dagster_instance_config_schema(), instance)
    assert config.success, config.errors
    launcher = instance.get("run_launcher")
    assert (launcher is None) == (values_of(name).get("orchestrator", {}).get("runs") == "process")
    if launcher is not None:
        config = process_config(K8sRunLauncher.config_type(), launcher["config"])
        assert config.success, config.errors
    (server,) = yaml.safe_load(data["workspace.yaml"])["load_from"]
    service = named(name, "Service", "code")
    assert server["grpc_server"]["host"] == service["metadata"]["name"]
    assert server["grpc_server"]["port"] == service["spec"]["ports"][0]["port"]


def test_the_local_stacks_dagster_and_the_charts_agree_on_what_the_loop_counts_on() -> None:
    local = yaml.safe_load((ROOT / "deployments/local/dagster.yaml").read_text())
    chart = yaml.safe_load(named("h100", "ConfigMap", "dagster")["data"]["dagster.yaml"])
    for key in ("concurrency", "run_retries", "telemetry", "freshness", "auto_materialize"):
        assert chart[key] == local[key]


@pytest.mark.parametrize("name", [*FILES, "shared"])
def test_launcher_and_code_location_never_say_two_things(name: str) -> None:
    """What both say, the code location decides (dagster-io/dagster#33900)."""
    instance = yaml.safe_load(named(name, "ConfigMap", "dagster")["data"]["dagster.yaml"])
    launcher = instance.get("run_launcher", {}).get("config", {})
    context = run_context(name)["k8s"]
    renamed = {"job_namespace": "namespace"}
    both = {key: value for key, value in launcher.items() if renamed.get(key, key) in context}
    assert all(context[renamed.get(key, key)] == value for key, value in both.items())
    assert not {"run_k8s_config", "volumes", "resources", "env_secrets", "env_vars"} & launcher.keys()


def test_a_run_carries_the_labels_that_its_network_policy_selects() -> None:
    labels = run_job("h100")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "run" and labels["app.kubernetes.io/name"] == "tide"


def test_trainer_pods_carry_the_labels_that_their_network_policy_selects() -> None:
    policy = named("h100", "NetworkPolicy", "trainer")
    assert policy["spec"]["podSelector"]["matchLabels"] == TRAINER


def test_dashboards_and_rules_are_those_of_the_repository() -> None:
    """`make chart` copies them; Helm packs no symbolic links."""
    copies = {
        "deployments/grafana/dashboards": "dashboards",
        "deployments/prometheus/rules": "rules",
    }
    for source, folder in copies.items():
        ours = {path.name: path.read_text() for path in (ROOT / source).iterdir()}
        assert ours == {path.name: path.read_text() for path in (CHART / "files" / folder).iterdir()}


def test_dashboards_and_rules_come_out_as_they_went_in() -> None:
    for path in (CHART / "files" / "dashboards").iterdir():
        config = named("h100", "ConfigMap", f"dashboard-{path.stem}")
        assert json.loads(config["data"][path.name]) == json.loads(path.read_text())
    (rule,) = of_kind("h100", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/rules/tide.yml").read_text())


def test_the_official_chart_gets_a_code_location_and_no_more() -> None:
    names = {each["metadata"]["name"] for each in of_kind("official", "Deployment")}
    assert names == {"tide-code", "tide-metrics"}
    values = yaml.safe_load((ROOT / "deployments/helm/dagster-values.yaml").read_text())
    (server,) = values["dagster-webserver"]["workspace"]["servers"]
    assert server["host"].startswith(named("official", "Service", "code")["metadata"]["name"])


@pytest.mark.parametrize(
    ("values", "named_in_error"),
    [
        ({"deploymnt": "x"}, "deploymnt"),
        ({"trainer": {"enabled": True, "profile": "mi300"}}, "profile"),
        ({"sglang": {"resources": {"requests": {"cpu": 1}}}}, "memory"),
        ({"objectStorage": {"uri": "/tmp/store"}}, "uri"),
        ({"mlflow": {"enabled": False}}, "mlflow.trackingUri"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(values: dict[str, Any], named_in_error: str) -> None:
    if "sglang" in values:
        values["sglang"]["resources"]["requests"] = {"cpu": 1, "memory": None}
    with pytest.raises(helm_python.HelmError, match=named_in_error):
        render(values)
