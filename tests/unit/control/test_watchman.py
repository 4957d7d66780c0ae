"""The served draft looked after: falls found, capture switched, mending asked for."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from control_fakes import LiveServer

from tide_platform.config import Settings
from tide_platform.control.audit import Action
from tide_platform.control.collection import NAME as COLLECTION
from tide_platform.control.drift import ALL, drifts
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory, remember
from tide_platform.control.reconcile import RunView
from tide_platform.control.records import Cut, Scan
from tide_platform.control.rollout import alone
from tide_platform.control.rollouts import Order
from tide_platform.control.states import WindowKey
from tide_platform.control.watchman import Look, look_after
from tide_platform.evaluation.cost_model import FILE, BatchCosts, CostModel


class World:
    """Servers whose requests accept about ``accepted`` of 20 draft tokens in 10 rounds."""

    def __init__(self, folder: Path, servers: int = 1):
        self.settings = Settings(state=folder)
        self.settings.watch.reference_requests, self.settings.watch.recent_requests = 60, 60
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db", clock=lambda: self.servers[0].now)
        self.servers = [LiveServer("old", f"s{number}") for number in range(servers)]
        self.draw = np.random.default_rng(0)
        self.run: RunView | None = None

    def traffic(self, requests: int, accepted: float, tenant: str = "ann") -> None:
        for _ in range(requests):
            for server in self.servers:
                count = int(np.clip(self.draw.normal(accepted, 1.5), 0, 20))
                server.serve(1, tenant, rounds=10, accepted=count)

    def promote(self, digest: str) -> None:
        previous = self.servers[0].draft
        for server in self.servers:
            server.reload(digest)
        order = Order(digest, "run r", "better")
        rollout = self.ledger.rollouts.begin("demo", order, previous, [s.base_url for s in self.servers])
        self.ledger.rollout_served(rollout, {})

    def look(self) -> Look:
        return look_after(self.settings, self.ledger, self.servers, self, lambda: self.servers[0].now)

    def mending(self, deployment: str) -> RunView | None:
        return self.run

    def memory(self) -> Memory:
        return Memory.from_json(self.ledger.controls.get("demo", MEMORY))

    def actions(self) -> list[Action]:
        return [entry.action for entry in self.ledger.audit("demo")]

    def reject(self, windows: int) -> None:
        """Challengers that the gate turns down."""
        for _ in range(windows):
            number = len(self.ledger.windows("demo")) + 1
            scan = self.ledger.scan("demo")
            self.ledger.cut("demo", scan, Scan(number, number, number, 0), [Cut(number - 1, number, 1, 9, 9)])
            key = WindowKey("demo", f"w{number:05}")
            self.ledger.claim(key, "run", 1)
            self.ledger.trained(key, "run", challenger=f"c{number}", parent="old", mlflow_run="m")
            self.servers[0].now += 1
            self.ledger.judged(key, "run", champion="old", passed=False, evidence={}, reason="no gain")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, servers=2)
    yield world
    world.ledger.close()


def test_steady_traffic_is_left_alone(world: World):
    for _ in range(40):
        world.traffic(20, 8)
        look = world.look()
        assert not look.mend and not look.drifts
    assert world.actions() == []
    assert len(world.memory().first) == len(world.memory().newest) == 60


def test_a_sudden_fall_is_a_drift_told_of_once(world: World):
    world.traffic(150, 12)
    world.look()
    world.traffic(40, 4)
    look = world.look()
    assert [drift.slice for drift in look.drifts] == [ALL]
    assert look.drifts[0].before > look.drifts[0].now + 0.3
    world.traffic(40, 4)
    assert not world.look().drifts and world.actions() == [Action.DRIFTED]


def test_a_slow_fall_is_seen_against_the_reference(world: World):
    world.traffic(60, 12)
    found = []
    for step in range(60):
        world.traffic(10, 12 - step * 0.1)
        found += world.look().drifts
    assert found and found[0].before == pytest.approx(1 + 12 / 10, abs=0.1)


def test_a_slice_that_falls_among_many_is_found(world: World):
    for _ in range(6):
        world.traffic(30, 12, "ann")
        world.traffic(10, 12, "bob")
        world.look()
    found = []
    for _ in range(6):
        world.traffic(20, 12, "ann")
        world.traffic(20, 5, "bob")
        found += world.look().drifts
    assert "bob" in {drift.slice for drift in found}
    assert "ann" not in {drift.slice for drift in found}


def test_a_slice_that_recovered_may_fall_again(world: World):
    for _ in range(2):
        world.traffic(150, 12)
        world.look()
        assert world.memory().drifted == {}
        world.traffic(60, 4)
        assert world.look().drifts
    assert world.actions().count(Action.DRIFTED) == 2


def test_equal_traffic_drifts_hardly_ever(tmp_path: Path):
    settings, alarms = Settings(), 0
    for seed in range(60):
        draw, memory = np.random.default_rng(seed), Memory()
        accepted = np.clip(draw.normal(8, 4, 400), 0, 20).astype(int)
        requests = [
            {
                "at": float(at),
                "tenant": "a",
                "rounds": 10,
                "accepted": int(a),
                "draft": "d",
                "straddles": False,
            }
            for at, a in enumerate(accepted)
        ]
        for first in range(0, 400, 50):
            memory = remember(memory, "d", requests[first : first + 50], 0.0, 200, 200)
            alarms += bool(found := drifts(settings, memory))
            if found:
                break
    assert alarms <= 3, f"{alarms} of 60 streams of 400 equal requests"


def test_another_draft_begins_anew_and_keeps_what_the_one_before_did(world: World):
    world.traffic(80, 12)
    world.look()
    world.promote("new")
    world.traffic(10, 14)
    world.look()
    memory = world.memory()
    assert (memory.draft, memory.before) == ("new", "old")
    assert len(memory.first) == 10 and len(memory.last_of_before) == 60


def test_a_champion_that_falls_behind_the_draft_before_it_is_suspected(world: World):
    world.traffic(150, 12)
    world.look()
    world.promote("new")
    world.traffic(60, 3)
    look = world.look()
    assert len(look.mend) == 1 and "new against the draft before it" in look.mend[0]
    assert world.look().mend, "until it was looked into"


def test_a_draft_that_is_only_being_tried_is_not_the_champion(world: World):
    """One server: the canary is all there is."""
    world.promote("champion")
    world.traffic(80, 12)
    world.look()
    world.servers[0].reload("tried")
    with alone(world.settings, world.ledger):
        world.traffic(20, 3)
        world.look()
    world.servers[0].reload("champion")
    world.traffic(20, 12)
    world.look()
    memory = world.memory()
    assert memory.draft == "champion" and len(memory.requests) == 100 and memory.before == ""


def test_the_first_draft_has_nothing_to_go_back_to(world: World):
    world.traffic(150, 12)
    world.look()
    world.traffic(150, 3)
    look = world.look()
    assert look.drifts and not look.mend


def test_a_champion_that_falls_hours_later_is_suspected(world: World):
    world.traffic(80, 8)
    world.look()
    world.promote("new")
    for _ in range(10):
        world.traffic(20, 12)
        assert not world.look().mend
    world.traffic(120, 2)
    assert "its own first requests" in world.look().mend[0] or "the draft before" in world.look().mend[0]


def test_capture_goes_off_when_training_does_not_pay_and_on_when_traffic_changes(world: World):
    world.traffic(150, 12)
    world.look()
    world.reject(world.settings.collection.patience - 1)
    world.look()
    assert world.servers[0].capturing
    world.reject(1)
    world.look()
    assert not world.servers[0].capturing
    world.traffic(60, 4)
    world.look()
    assert world.servers[0].capturing
    world.look()
    assert world.servers[0].capturing, "the same verdicts do not switch it off again"
    assert world.actions()[-2:] == [Action.DRIFTED, Action.CAPTURE_ON]


def test_a_restarted_server_is_told_again(world: World):
    world.look()
    world.reject(3)
    world.look()
    world.servers[0].start()
    assert world.servers[0].capturing
    world.traffic(1, 8)
    world.look()
    assert not world.servers[0].capturing


def test_what_a_hand_switched_stays(pair: World):
    pair.look()
    pair.servers[0].capturing = False
    look = pair.look()
    assert not pair.servers[0].capturing and "by hand" in look.message
    pair.reject(3)
    pair.look()
    assert not pair.servers[1].capturing
    pair.servers[1].capturing = True
    look = pair.look()
    assert pair.servers[1].capturing and "by hand" in look.message


def test_capture_is_left_on_where_it_shall_be(world: World):
    world.settings.collection.mode = "always"
    world.look()
    world.reject(5)
    world.look()
    assert world.servers[0].capturing
    assert not world.ledger.controls.get("demo", COLLECTION)


def test_a_dead_rollout_is_mended_and_a_living_one_left_alone(world: World):
    world.ledger.rollouts.begin("demo", Order("new", "run r", "better"), "old", ["http://s0"])
    with alone(world.settings, world.ledger):
        assert not world.look().mend
    assert "left unfinished" in world.look().mend[0]


def test_speculation_that_does_not_pay_is_told_of_once(world: World):
    """The servers take 1 s a round of 10 / 10 s, whatever is accepted: 18 tokens in a second."""
    conditions = {"dtype": world.settings.serving.dtype, "device": world.settings.serving.device}
    path = world.settings.state / FILE
    CostModel({1: BatchCosts(20.0, 0.1, {2: 1.1})}, "t", conditions).write(path)
    world.traffic(40, 8)
    look = world.look()
    assert world.actions() == [Action.SLOWER] and "slower than none at batch size 1: 0.3" in look.message
    assert world.ledger.controls.get("demo", "speedup") == {"1": pytest.approx(0.35, abs=0.03)}
    world.traffic(40, 8)
    assert "slower than none" in world.look().message and world.actions() == [Action.SLOWER]
    CostModel({1: BatchCosts(80.0, 0.1, {2: 1.1})}, "t", conditions).write(path)
    world.traffic(40, 8)
    assert "slower" not in world.look().message and world.actions()[-1] is Action.FASTER


def test_a_damaged_cost_model_is_told_of_and_stops_nothing(world: World):
    (world.settings.state / FILE).write_text("{}")
    world.traffic(5, 8)
    assert "not a cost model" in world.look().message and world.memory().draft == "old"


def test_one_run_mends_at_a_time(world: World):
    world.ledger.rollouts.begin("demo", Order("new", "run r", "better"), "old", ["http://s0"])
    now = world.servers[0].now
    for status, since, mended_by in (
        ("started", now - 999, "r1"),
        ("failure", now - 1, "r1"),
        ("failure", now - world.settings.watch.mend_seconds - 1, None),
    ):
        world.run = RunView("r1", status, since)
        assert world.look().mended_by == mended_by


def test_a_server_that_came_back_with_another_draft_is_mended(pair: World):
    pair.promote("new")
    assert not pair.look().mend
    pair.servers[1].draft = "old"
    pair.servers[1].start()
    assert pair.look().mend == ["http://s1 serves old, the champion is new"]
    assert pair.memory().draft == "new", "requests of servers that differ are not compared"


def test_a_server_that_is_gone_is_told_of_and_the_rest_goes_on(pair: World):
    pair.servers[1].gone = True
    pair.traffic(5, 8)
    look = pair.look()
    assert not look.mend and "http://s1" in look.message
    assert sum(block.requests for block in pair.ledger.history.blocks("demo")) == 5


def test_what_was_seen_survives_the_process(world: World, tmp_path: Path):
    world.traffic(150, 12)
    world.look()
    world.ledger.close()
    world.ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=lambda: world.servers[0].now)
    world.traffic(40, 4)
    assert world.look().drifts
