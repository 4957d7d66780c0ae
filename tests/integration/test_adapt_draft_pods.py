"""`adapt_draft` from the sensor's tick to the served draft, its training in pods of the fake cluster. The
SGLang server alone is stood in for.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import dagster as dg
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

from fakekube import FakeKube, Trouble, after, fake_kube
from small import land, small_settings
from stand_in import StandIn, stand_in

import resources.cycle
from tests.free_ports import free_port
from tide_platform.config import Settings, draft_digest, dump_settings
from tide_platform.config.cluster import Cluster
from tide_platform.control.ledger import Ledger
from tide_platform.control.states import State, WindowKey

pytestmark = pytest.mark.integration
SAMPLES = 12


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A deployment with a window's samples, everything below one folder."""
    made = small_settings(tmp_path, samples=SAMPLES)
    made.serving.port = free_port()
    land(made, 6, seed=1, tenant="reference")
    land(made, SAMPLES, seed=2)
    monkeypatch.setenv("TIDE_CONFIG", str(tmp_path / "tide.yaml"))
    monkeypatch.setenv("TIDE_ADMIN_KEY", "a-test")
    monkeypatch.chdir(tmp_path)  # MLflow's artifacts
    yield made
    resources.cycle._ledger.cache_clear()


@pytest.fixture
def world(settings: Settings, tmp_path: Path) -> Iterator[tuple[FakeKube, StandIn]]:
    assert settings.draft is not None and settings.target is not None
    with ExitStack() as stack:
        claims = {"state": tmp_path, "targets": settings.target.parent}
        yield (
            stack.enter_context(fake_kube(tmp_path, claims)),
            stack.enter_context(stand_in(settings.serving.port, draft_digest(settings.draft))),
        )


def tick(instance: dg.DagsterInstance) -> dg.RunRequest:
    """The sensor's: cuts the window, asks for its run."""
    from tide_platform.definitions import defs

    sensor = defs.resolve_sensor_def("enough_hidden_states")
    with dg.build_sensor_context(
        instance=instance, repository_def=defs.get_repository_def(), resources=defs.resources
    ) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult) and result.run_requests, result
    for request in result.dynamic_partitions_requests or []:
        instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
    return result.run_requests[0]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_window_becomes_a_served_draft_by_way_of_pods(
    settings: Settings, world: tuple[FakeKube, StandIn], tmp_path: Path, nodes: int
) -> None:
    fake, server = world
    assert settings.target is not None
    settings.cluster = Cluster.model_validate({
        "kubeconfig": fake.kubeconfig,
        "trainer": {
            "profile": "cpu", "image": "tide-trainer:1", "nodes": nodes,
            "volumes": [
                {"claim": "state", "path": tmp_path},
                {"claim": "targets", "path": settings.target.parent, "read_only": True},
            ],
        },
    })  # fmt: skip
    (tmp_path / "tide.yaml").write_text(dump_settings(settings))
    from tide_platform.definitions import defs  # reads it

    fake.plan(1, Trouble("preempted", "Preempted by pod serving-0", after('"step": 2,')))
    with dg.instance_for_test() as instance:
        request = tick(instance)
        result = defs.resolve_job_def("adapt_draft").execute_in_process(
            partition_key=request.partition_key, tags=request.tags, instance=instance, raise_on_error=False
        )
        log = "\n".join(each.user_message for each in instance.all_logs(result.run_id))
    assert "Preempted by pod serving-0); started again (1 of 3)" in log
    assert fake.launches == 2 and fake.left() == []
    ledger = Ledger(settings.ledger.url)
    record = ledger.get(WindowKey.parse(request.partition_key or ""))
    ledger.close()
    # a draft of so few samples may be judged either way; it was trained, filed and judged
    assert record.state in (State.DEPLOYED, State.REJECTED), log
    assert record.challenger is not None and record.mlflow_run is not None
    if record.state is State.DEPLOYED:
        assert result.success and server.served == record.challenger
