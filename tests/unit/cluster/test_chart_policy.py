"""What holds for every pod of the chart, a run's included."""

from typing import Any

import pytest

from tests.unit.cluster.chart import ALL, named, of_kind, pods, rendered, values_of

SECRET_WORDS = (
    "password",
    "secret_access",
    "token",
    "admin_key",
    "backend_store_uri",
    "ledger__url",
    "postgres_url",
)


def _given(name: str, section: str, key: str, default: str) -> str:
    return values_of(name).get(section, {}).get(key) or default


@pytest.mark.parametrize("name", ALL)
def test_no_pod_can_do_more_than_it_must(name: str) -> None:
    found = pods(name)
    assert {"StatefulSet/tide-sglang", "Deployment/tide-code", "Pod/tide-doctor", "Job/run"} <= {
        p.name for p in found
    }
    for pod in found:
        spec, security = pod.spec, pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] >= 10000, pod.name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, pod.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & {key for key, value in spec.items() if value}, (
            pod.name
        )
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], pod.name
        assert spec["serviceAccountName"].startswith("tide-"), pod.name
        for container in pod.containers:
            where, own = f"{pod.name}/{container['name']}", container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True, where
            assert own["allowPrivilegeEscalation"] is False and not own["privileged"], where
            assert own["capabilities"] == {"drop": ["ALL"]}, where
            assert all("hostPort" not in port for port in container.get("ports", [])), where


@pytest.mark.parametrize("name", ALL)
def test_every_container_says_what_it_needs(name: str) -> None:
    for pod in pods(name):
        for container in pod.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), f"{pod.name}/{container['name']}"
            assert "memory" in resources["limits"], f"{pod.name}/{container['name']}"


@pytest.mark.parametrize("name", ALL)
def test_no_secret_is_in_the_chart(name: str) -> None:
    assert of_kind(name, "Secret") == []
    for pod in pods(name):
        for container in pod.containers:
            for variable in container.get("env", []):
                assert not any(word in variable["name"].lower() for word in SECRET_WORDS), variable["name"]


@pytest.mark.parametrize("name", ALL)
def test_only_the_parts_that_ask_the_api_can(name: str) -> None:
    asks = {pod.name for pod in pods(name) if pod.spec.get("automountServiceAccountToken") is not False}
    own = {"Deployment/tide-webserver", "Deployment/tide-daemon"}
    always = {"Deployment/tide-code", "Deployment/tide-metrics", "Pod/tide-doctor", "Job/run"}
    assert asks == always | (own if name != "official" else set())
    bound = {subject["name"] for each in of_kind(name, "RoleBinding") for subject in each["subjects"]}
    assert bound == {"tide-orchestrator", "tide-reader"}, "trainers and servers have no rights"
    for role in [*of_kind(name, "Role"), *of_kind(name, "ClusterRole")]:
        for rule in role["rules"]:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            assert "secrets" not in rule["resources"] and "pods/exec" not in rule["resources"]


@pytest.mark.parametrize("name", ALL)
def test_every_reference_is_rendered_or_a_value(name: str) -> None:
    maps = {each["metadata"]["name"] for each in of_kind(name, "ConfigMap")}
    accounts = {each["metadata"]["name"] for each in of_kind(name, "ServiceAccount")}
    claims = {each["metadata"]["name"] for each in of_kind(name, "PersistentVolumeClaim")}
    claims |= {_given(name, "state", "claim", "tide-state"), _given(name, "models", "claim", "tide-models")}
    secrets = {f"tide-{key}" for key in ("object-storage", "ledger", "admin", "dagster", "mlflow")}
    secrets |= {_given(name, "secrets", "notify", "tide-admin")}
    for pod in pods(name):
        assert pod.spec["serviceAccountName"] in accounts, pod.name
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps, pod.name
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, pod.name
        used = set()
        for container in pod.containers:
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            assert set(mounts) <= volumes.keys() | pod.claims, f"{pod.name}/{container['name']}"
            used |= set(mounts)
            for source in container.get("envFrom", []):
                assert source["secretRef"]["name"] in secrets, f"{pod.name}/{container['name']}"
        assert volumes.keys() <= used, f"{pod.name}: a volume that nothing mounts"


@pytest.mark.parametrize("name", ALL)
def test_every_port_of_a_service_is_one_of_its_pods(name: str) -> None:
    monitored = set()
    for service in of_kind(name, "Service"):
        wanted = service["spec"]["selector"]
        (pod,) = [pod for pod in pods(name) if wanted.items() <= pod.labels.items()]
        known = {port["name"] for container in pod.containers for port in container.get("ports", [])}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in known, service["metadata"]["name"]
            monitored.add((service["metadata"]["labels"]["app.kubernetes.io/component"], port["name"]))
    for monitor in of_kind(name, "ServiceMonitor"):
        selector, (endpoint,) = monitor["spec"]["selector"]["matchLabels"], monitor["spec"]["endpoints"]
        matched = [s for s in of_kind(name, "Service") if selector.items() <= s["metadata"]["labels"].items()]
        assert len(matched) == 1, "each target is scraped once"
        assert endpoint["port"] in {port["name"] for port in matched[0]["spec"]["ports"]}


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_ports_that_are_there(name: str) -> None:
    for pod in pods(name):
        for container in pod.containers:
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked: dict[str, Any] = container.get(probe, {})
                port = (asked.get("httpGet") or asked.get("tcpSocket") or {}).get("port")
                assert port is None or port in ports, f"{pod.name}/{container['name']}"


@pytest.mark.parametrize("name", ALL)
def test_state_is_at_one_path_everywhere(name: str) -> None:
    """Runs, trainers and servers name drafts by their path."""
    claim = _given(name, "state", "claim", "tide-state")
    for pod in pods(name):
        shared = {
            v["name"]
            for v in pod.spec["volumes"]
            if v.get("persistentVolumeClaim", {}).get("claimName") == claim
        }
        for container in pod.spec["containers"]:
            for mount in container["volumeMounts"]:
                if mount["name"] in shared:
                    wanted = "/var/lib/tide/state" + ("/" + mount["subPath"] if "subPath" in mount else "")
                    assert mount["mountPath"] == wanted, f"{pod.name}/{container['name']}"


def test_a_server_keeps_its_spool_and_shares_its_drafts() -> None:
    sglang = named("h100", "StatefulSet", "sglang")["spec"]
    (server, ingest, told) = sglang["template"]["spec"]["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    assert mounts["/var/lib/tide/state"] == "state" and mounts["/var/lib/tide/state/drafts"] == "shared"
    for other in (ingest, told):
        assert {m["mountPath"]: m["name"] for m in other["volumeMounts"]}["/var/lib/tide/state"] == "state"
    assert [claim["metadata"]["name"] for claim in sglang["volumeClaimTemplates"]] == ["state"]
    assert sglang["persistentVolumeClaimRetentionPolicy"]["whenScaled"] == "Retain"


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_named_and_labelled(name: str) -> None:
    seen = set()
    for each in rendered(name):
        metadata = each["metadata"]
        key = (each["kind"], metadata["name"])
        assert key not in seen, key
        seen.add(key)
        assert metadata["labels"]["app.kubernetes.io/instance"] == "tide", key
