"""`tide doctor --cluster`: each fault by name, with its mend; and the rights that the chart grants."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from kubernetes.client import ApiClient

from tests.unit.cluster.api_server import Api, kubeconfig, served
from tests.unit.cluster.api_stub import pod
from tests.unit.cluster.chart import named
from tide_platform.cluster.rights import DOCTOR, SERVING, TRAINER, Right
from tide_platform.config import Settings, dump_settings
from tide_platform.config.cluster import Cluster
from tide_platform.gate.cluster_doctor import state as doctor_state
from tide_platform.gate.cluster_doctor.diagnose import diagnose_cluster
from tide_platform.gate.doctor import Finding
from tide_platform.serving.client import SglangClient

CORE = "/api/v1/namespaces/tide"


def node(name: str, gpus: int = 8, taints: list[dict[str, str]] | None = None, **spec: Any) -> dict[str, Any]:
    gpu_taint = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    return {
        "metadata": {"name": name},
        "spec": {"taints": gpu_taint if taints is None else taints, **spec},
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "64"}},
    }


def claim(name: str, mode: str = "ReadWriteMany", phase: str = "Bound") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"accessModes": [mode]}, "status": {"phase": phase}}


class World:
    """A cluster in which all is well, until a test spoils it."""

    def __init__(self, folder: Path, config: Path, api: Api):
        self.api = api
        cluster = {
            "namespace": "tide",
            "kubeconfig": str(config),
            "trainer": {
                "profile": "h100",
                "image": "tide/trainer:1",
                "secrets": ["tide-object-storage"],
                "image_pull_secrets": ["tide-registry"],
                "volumes": [
                    {"claim": "tide-state", "path": str(folder / "state")},
                    {"claim": "tide-models", "path": "/models", "read_only": True},
                ],
            },
            "serving": {"selector": "app=sglang", "expected": 1},
        }
        self.settings = Settings(state=folder / "state", cluster=Cluster.model_validate(cluster))
        self.settings.storage.uri = "s3://tide"
        self.settings.state.mkdir()
        with ApiClient() as client:
            server = client.sanitize_for_serialization(pod("tide-sglang-0"))
        api.answers |= {
            f"{CORE}/pods": [server],
            f"{CORE}/persistentvolumeclaims/tide-state": claim("tide-state"),
            f"{CORE}/persistentvolumeclaims/tide-models": claim("tide-models", "ReadOnlyMany"),
            f"{CORE}/secrets/tide-object-storage": {"data": {"AWS_SECRET_ACCESS_KEY": "c2VjcmV0"}},
            f"{CORE}/secrets/tide-registry": {"data": {}},
            "/api/v1/nodes": [node("gpu-1"), node("gpu-2")],
        }

    def findings(self) -> list[Finding]:
        return list(diagnose_cluster(self.settings))

    def wrong(self) -> dict[str, list[Finding]]:
        """By subject, all that is not well."""
        found: dict[str, list[Finding]] = {}
        for finding in self.findings():
            if finding.grade != "ok":
                found.setdefault(finding.about, []).append(finding)
        return found

    def only(self, about: str) -> Finding:
        wrong = self.wrong()
        assert list(wrong) == [about], wrong
        assert wrong[about][0].mend or wrong[about][0].grade == "error"
        return wrong[about][0]


STATUS = {"deployment": "demo", "draft_digest": "d", "capture": {"live": True}}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TIDE_ADMIN_KEY", "key")
    monkeypatch.setattr(doctor_state, "store", lambda _: iter([Finding("store", "ok", "honours")]))
    monkeypatch.setattr(SglangClient, "healthy", lambda self: True)
    monkeypatch.setattr(SglangClient, "status", lambda self: dict(STATUS))
    api = Api()
    with served(api, tmp_path) as config:
        yield World(tmp_path, config, api)


def test_a_cluster_in_which_all_is_well(world: World) -> None:
    findings = world.findings()
    assert {finding.grade for finding in findings} == {"ok"}, findings
    subjects = list(dict.fromkeys(finding.about for finding in findings))
    expected = ["configuration", "api", "rights", "claims", "secrets", "nodes", "serving", "store", "state"]
    assert subjects == expected
    assert not any("c2VjcmV0" in finding.text for finding in findings)
    assert [path.name for path in world.settings.state.iterdir()] == [], "the probe file is gone"


def test_a_right_that_is_lacking(world: World) -> None:
    world.api.denied = {"delete jobs", "get pods/log"}
    finding = world.only("rights")
    assert "get pods/log, delete jobs.batch" in finding.text and "bind its Role" in finding.mend


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (404, "claim tide-state: there is none"),
        (claim("tide-state", "ReadWriteOnce"), "ReadWriteOnce, Bound"),
        (claim("tide-state", phase="Pending"), "Pending"),
        (403, "may not look"),
    ],
)
def test_a_claim_that_several_pods_cannot_mount(world: World, answer: Any, text: str) -> None:
    world.api.answers[f"{CORE}/persistentvolumeclaims/tide-state"] = answer
    finding = world.only("claims")
    assert text in finding.text
    assert finding.grade == ("warn" if text in ("Pending", "may not look") else "error")


def test_a_state_folder_that_no_volume_holds(world: World) -> None:
    assert world.settings.cluster is not None and world.settings.cluster.trainer is not None
    world.settings.cluster.trainer.volumes = world.settings.cluster.trainer.volumes[1:]
    assert "no writable volume" in world.only("claims").text


def test_secrets_by_name(world: World) -> None:
    world.api.answers[f"{CORE}/secrets/tide-object-storage"] = 404
    world.api.answers[f"{CORE}/secrets/tide-registry"] = 403
    none, unseen = world.wrong()["secrets"]
    assert (none.grade, none.text) == ("error", "secret tide-object-storage: there is none")
    assert unseen.grade == "warn" and "kubectl -n tide get secret tide-registry" in unseen.mend


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "there are none"),
        (
            [node("n", taints=[{"key": "tenant", "value": "x", "effect": "NoSchedule"}])],
            "taints tenant:NoSchedule",
        ),
        ([node("n", unschedulable=True)], "none takes the trainer"),
        ([node("n", gpus=0)], "with 0 nvidia.com/gpu"),
        ([node("n", gpus=4), node("m", gpus=4)], "room for 0 pods of 8"),
        (403, "may not look"),
    ],
)
def test_nodes_on_which_no_trainer_would_run(world: World, nodes: Any, text: str) -> None:
    world.api.answers["/api/v1/nodes"] = nodes
    assert text in world.only("nodes").text
    assert any("nvidia.com%2Fgpu.product%3DNVIDIA-H100" in path for path in world.api.asked)


def test_servers_that_wait_and_plugins_that_are_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with ApiClient() as client:
        waits = client.sanitize_for_serialization(
            pod("tide-sglang-1", ready=False, waiting="ImagePullBackOff")
        )
    world.api.answers[f"{CORE}/pods"].append(waits)
    assert world.settings.cluster is not None and world.settings.cluster.serving is not None
    world.settings.cluster.serving.expected = 2
    dead = STATUS | {"capture": {"live": False, "error": "no ring"}}
    monkeypatch.setattr(SglangClient, "status", lambda self: dead)
    texts = [finding.text for finding in world.wrong()["serving"]]
    assert texts == [
        "tide-sglang-1: sglang: ImagePullBackOff",
        "1 of 2 servers are ready",
        "tide-sglang-0 at http://10.0.0.1:30000: capture is dead: no ring",
    ]


def test_a_namespace_that_is_not_ours(world: World) -> None:
    world.api.answers[f"{CORE}/pods"] = 403
    assert "set cluster.namespace" in world.only("api").mend


def test_an_api_that_is_gone_hides_nothing_else(world: World, tmp_path: Path) -> None:
    assert world.settings.cluster is not None
    world.settings.cluster.kubeconfig = kubeconfig(tmp_path / "gone", 9)
    assert "does not answer" in world.only("api").text
    assert [f.about for f in world.findings()][-2:] == ["store", "state"]


def test_a_state_folder_without_locks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert "locked twice" in world.only("state").text
    assert not list(world.settings.state.iterdir())


def test_a_store_that_is_a_folder(tmp_path: Path) -> None:
    (finding,) = doctor_state.store(Settings(state=tmp_path))
    assert finding.grade == "error" and "is a folder" in finding.text


def test_without_a_section_there_is_nothing_to_look_at() -> None:
    (finding,) = diagnose_cluster(Settings())
    assert finding.grade == "error" and "no `cluster` section" in finding.text


def test_the_command_tells_a_machine_as_well(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tide_platform.cli.doctor import command

    (tmp_path / "tide.yaml").write_text(dump_settings(world.settings))
    for status, denied in ((0, set()), (1, {"create pods"})):
        world.api.denied = denied
        with pytest.raises(typer.Exit) as ended:
            command(tmp_path / "tide.yaml", None, None, True, True)
        told = json.loads(capsys.readouterr().out)
        assert (ended.value.exit_code, told["ok"]) == (status, not status)


def test_the_chart_grants_what_is_asked_for_and_no_more() -> None:
    granted = {
        Right(group, resource.partition("/")[0], resource.partition("/")[2], verb)
        for rule in named("h100", "Role", "orchestrator")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == {*TRAINER, *SERVING, *DOCTOR}
