"""Sensor, job, check and ledger in one process; the steps' own work is replaced, their ledger is real."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg
import pytest

import resources.cycle
from resources.runs import DagsterRuns
from tests.unit.control.control_fakes import Row
from tide_platform.config import Settings, dump_settings
from tide_platform.control import consistency
from tide_platform.control import cycle as domain
from tide_platform.control.ledger import Ledger
from tide_platform.control.promotion import Verdict
from tide_platform.control.records import Cut, Scan
from tide_platform.control.rollout import Deployed
from tide_platform.control.rollouts import Order
from tide_platform.control.states import State, WindowKey
from tide_platform.gate.report import Check, GateReport, failed, passed

KEY = WindowKey("demo", "w00001")


@dataclass
class World:
    """A deployment whose steps do nothing but keep the ledger; ``broken`` names those that fail."""

    settings: Settings
    ledger: Ledger
    instance: dg.DagsterInstance
    passes: bool = True
    broken: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    faults: list[Check] = field(default_factory=list)  # what the consistency gate finds

    def train(self, turn: domain.Turn, command: domain.TrainCommand) -> domain.Trained:
        with turn.hold() as held:
            self._step("train")
            if held.record.state is State.RUNNING:
                turn.ledger.trained(turn.key, turn.run_id, challenger="new", parent="old", mlflow_run="m")
            return domain.Trained("new", "old", "m", "2", 7, 10, False, {"loss": 1.5})

    def check(self, settings: Settings, ledger: Ledger, key: WindowKey) -> GateReport:
        checks = (passed("files", "draft", "15 tensors"), *self.faults)
        return GateReport("drafts/new", "new", "target", "t", "transformers", 2, 0.1, checks)

    def judge(self, turn: domain.Turn) -> Verdict:
        with turn.hold():
            self._step("judge")
            verdict = Verdict(
                str(turn.key), "old", "new", 2, 0.95, 0.02, 0.97, self.passes, ["it was said so"]
            )
            turn.ledger.judged(
                turn.key,
                turn.run_id,
                champion="old",
                passed=self.passes,
                evidence=verdict.to_json(),
                reason=verdict.summary,
            )
            return verdict

    def deploy(self, turn: domain.Turn) -> Deployed:
        with turn.hold():
            self._step("deploy")
            deployed = Deployed("new", "old", 0.1, "w", 0.2)
            order = Order("new", "a test", "it was said so", window=turn.key.window, run_id=turn.run_id)
            rollout = turn.ledger.rollouts.begin(turn.key.deployment, order, "old", ["http://server"])
            turn.ledger.rollout_served(rollout, deployed.to_json())
            return deployed

    def _step(self, name: str) -> None:
        self.done.append(name)
        if name in self.broken:
            raise RuntimeError(f"{name} broke\nat length")

    def tick(self) -> dg.SensorResult:
        from tide_platform.definitions import defs

        sensor = defs.resolve_sensor_def("enough_hidden_states")
        with dg.build_sensor_context(
            instance=self.instance, repository_def=defs.get_repository_def(), resources=defs.resources
        ) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        for request in result.dynamic_partitions_requests or []:
            self.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        for event in result.asset_events or []:
            self.instance.report_runless_asset_event(event)
        return result

    def run(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        from tide_platform.definitions import defs

        return defs.resolve_job_def("adapt_draft").execute_in_process(
            partition_key=request.partition_key,
            tags={**request.tags, "dagster/run_key": request.run_key or ""},
            instance=self.instance,
            raise_on_error=False,
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    settings = Settings(state=tmp_path)
    settings.window.retry_s = 0
    settings.storage.uri = str(tmp_path / "store")
    settings.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    (tmp_path / "tide.yaml").write_text(dump_settings(settings))
    monkeypatch.setenv("TIDE_CONFIG", str(tmp_path / "tide.yaml"))
    monkeypatch.setattr("tide_platform.control.dataset.Dataset.tip", lambda self: (7, 10))
    ledger = Ledger(settings.ledger.url)
    ledger.cut("demo", Scan(), Scan(7, 10, 9, 0), [Cut(-1, 9, 7, 10, 100)])
    with dg.instance_for_test() as instance:
        world = World(settings, ledger, instance)
        monkeypatch.setattr(domain, "train_window", world.train)
        monkeypatch.setattr(domain, "judge_window", world.judge)
        monkeypatch.setattr(consistency, "check_challenger", world.check)
        monkeypatch.setattr(domain, "deploy_window", world.deploy)
        yield world
    ledger.close()
    resources.cycle._ledger.cache_clear()


def only_request(result: dg.SensorResult) -> dg.RunRequest:
    assert result.run_requests and len(result.run_requests) == 1
    return result.run_requests[0]


def checks(run: dg.ExecuteInProcessResult) -> dict[str, bool]:
    return {each.check_name: each.passed for each in run.get_asset_check_evaluations()}


def test_a_window_becomes_a_served_draft(world: World):
    result = world.tick()
    request = only_request(result)
    assert (request.run_key, request.partition_key) == ("demo/w00001/1", "demo/w00001")
    assert request.tags["tide/lance_version"] == "7"
    run = world.run(request)
    assert run.success and world.done == ["train", "judge", "deploy"]
    assert checks(run) == {
        "draft_is_consistent": True,
        "challenger_is_better": True,
        "reference_is_held": False,  # the verdict says nothing of it
    }
    assert {event.step_key for event in run.get_asset_materialization_events()} == {
        "draft_checkpoint",
        "acceptance_report",
        "serving_draft",
    }
    record = world.ledger.get(KEY)
    assert (record.state, record.run_id) == (State.DEPLOYED, run.run_id)
    assert world.tick().run_requests in (None, [])
    landed = world.instance.get_latest_materialization_event(dg.AssetKey("hidden_states"))
    assert landed is not None and landed.asset_materialization is not None
    assert landed.asset_materialization.partition == "demo/w00001"


def test_a_rejected_challenger_is_a_valid_end(world: World):
    world.passes = False
    run = world.run(only_request(world.tick()))
    assert not run.success and world.done == ["train", "judge"]
    assert checks(run)["challenger_is_better"] is False
    assert world.ledger.get(KEY).state is State.REJECTED
    assert world.tick().run_requests in (None, [])
    stored = world.instance.get_run_by_id(run.run_id)
    assert stored is not None and stored.tags["tide/verdict"] == "rejected"


def test_a_run_that_fails_is_followed_by_the_next_attempt_which_keeps_the_checkpoint(world: World):
    world.broken = {"judge"}
    assert not world.run(only_request(world.tick())).success
    request = only_request(world.tick())
    assert request.run_key == "demo/w00001/2"
    record = world.ledger.get(KEY)
    assert record.state is State.TRAINED
    assert record.reason is not None and "acceptance_report: RuntimeError: judge broke" in record.reason
    world.broken = set()
    assert world.run(request).success
    assert world.ledger.get(KEY).state is State.DEPLOYED


def test_a_window_that_always_fails_ends_failed(world: World):
    world.broken = {"train"}
    for _ in range(world.settings.window.max_attempts):
        world.run(only_request(world.tick()))
    assert world.tick().run_requests in (None, [])
    record = world.ledger.get(KEY)
    assert record.state is State.FAILED and record.reason is not None and "train broke" in record.reason


def test_a_run_started_by_hand_takes_a_failed_window_up(world: World):
    world.broken = {"train"}
    for _ in range(world.settings.window.max_attempts):
        world.run(only_request(world.tick()))
    world.tick()
    world.broken = set()
    run = world.run(dg.RunRequest(partition_key="demo/w00001"))
    assert run.success and world.ledger.get(KEY).state is State.DEPLOYED


def test_a_draft_that_would_not_be_served_as_it_was_trained_is_not_judged(world: World):
    world.faults = [failed("map", "draft", "stale d2t")]
    run = world.run(only_request(world.tick()))
    assert not run.success and world.done == ["train"]
    assert checks(run) == {"draft_is_consistent": False}
    (found,) = run.get_asset_check_evaluations()
    assert found.description == "map: stale d2t" and found.partition == "demo/w00001"


def test_the_pages_hold_figures_and_where_the_window_is(world: World):
    world.run(only_request(world.tick()))
    shown = {
        name: event.asset_materialization.metadata
        for name in ("hidden_states", "draft_checkpoint", "acceptance_report", "serving_draft")
        if (event := world.instance.get_latest_materialization_event(dg.AssetKey(name)))
        and event.asset_materialization
    }
    assert {name: of["lance_version"].value for name, of in shown.items()} == dict.fromkeys(shown, 7)
    assert len(shown) == 4 and {of["window"].value for of in shown.values()} == {"w00001"}
    assert shown["hidden_states"]["tokens_a_sample"] == dg.FloatMetadataValue(10.0)
    assert shown["draft_checkpoint"]["loss"] == dg.FloatMetadataValue(1.5)
    assert shown["serving_draft"]["pause_s"] == dg.FloatMetadataValue(0.1)
    assert "mlflow" not in shown["draft_checkpoint"]  # the registry is a file, which has no pages


def test_another_deployments_window_is_refused(world: World):
    world.instance.add_dynamic_partitions("windows", ["other/w00001"])
    run = world.run(dg.RunRequest(partition_key="other/w00001"))
    assert not run.success and world.done == []
    why = DagsterRuns(world.instance).why(run.run_id)
    assert "this code location works for deployment demo" in why and "code location of other" in why


def test_only_the_deployments_own_partitions_are_retired(world: World, monkeypatch: pytest.MonkeyPatch):
    world.settings.window.keep_partitions = 10
    (world.settings.state / "tide.yaml").write_text(dump_settings(world.settings))
    old = [f"{name}/w{number:05d}" for name in ("demo", "other") for number in range(1, 13)]
    world.instance.add_dynamic_partitions("windows", old)
    rows = [Row(number) for number in range(10, 10 + world.settings.window.min_samples)]
    monkeypatch.setattr("tide_platform.control.dataset.Dataset.tip", lambda self: (8, 10 + len(rows)))
    monkeypatch.setattr("tide_platform.control.dataset.Dataset.after", lambda self, *_: rows)
    result = world.tick()
    deleted = [
        key
        for request in result.dynamic_partitions_requests or []
        if isinstance(request, dg.DeleteDynamicPartitionsRequest)
        for key in request.partition_keys
    ]
    assert deleted == [
        "demo/w00001"
    ]  # of the two oldest; the other is open, it took the samples of the first


def test_a_late_worker_does_nothing(world: World):
    request = only_request(world.tick())
    world.ledger.release(world.ledger.get(KEY), "given up", 3)
    run = world.run(request)
    assert not run.success and world.done == []


def test_windows_that_were_merged_are_told_on_the_assets_page(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tide_platform.control.dataset.Dataset.tip", lambda self: (8, 30))
    cuts = [Cut(9, 19, 8, 10, 100), Cut(19, 29, 8, 10, 100)]
    world.ledger.cut("demo", Scan(7, 10, 9, 0), Scan(8, 30, 29, 0), cuts)
    result = world.tick()
    assert only_request(result).partition_key == "demo/w00003"
    observations = [event for event in result.asset_events or [] if isinstance(event, dg.AssetObservation)]
    assert [event.partition for event in observations] == ["demo/w00001", "demo/w00002"]
    assert {event.metadata["state"].value for event in observations} == {"merged"}
    assert set(world.instance.get_dynamic_partitions("windows")) == {
        "demo/w00001",
        "demo/w00002",
        "demo/w00003",
    }
