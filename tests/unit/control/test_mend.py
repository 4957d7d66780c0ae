"""Servers, alias, pointer and ledger brought to one draft; a champion taken back that replays worse."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_fakes import LiveServer, make_draft

from tide_platform.config import Settings
from tide_platform.control import hands, mend
from tide_platform.control.audit import Action
from tide_platform.control.champion import Champion
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory
from tide_platform.control.mend import LEAST_SAMPLES, Mended, NotMended
from tide_platform.control.promotion import Comparison, Interval, Measured
from tide_platform.control.rollout import Means, roll_out
from tide_platform.control.rollouts import Order, Step
from tide_platform.evaluation.sequence import Evidence
from tide_platform.serving.drafts import deployed_draft, mark_deployed


def compared(gain: float, lower: float) -> Comparison:
    """The draft before against the champion."""
    measured = Measured(1.5, [1.4, 1.5], [0.4, 0.2])
    evidence = Evidence(40, 1 + gain, 1 + lower, 1.1 + gain, 0.99, 0.02, 1.0)
    return Comparison(40, measured, measured, Interval(gain, lower, gain + 0.1), evidence)


class World:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.settings = Settings(state=folder)
        root = self.settings.drafts_folder
        self.old, self.new = make_draft(root, "old"), make_draft(root, "new")
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        self.servers = [LiveServer(self.old, f"s{number}") for number in range(2)]
        self.alias = self.old
        self.comparison = compared(0.0, -0.1)
        self.samples = 64
        mark_deployed(self.settings, self.old)

        @contextmanager
        def means(*_: Any) -> Iterator[Means]:
            yield self.means()

        def champion(*_: Any) -> Champion:
            digest = self.servers[0].draft
            return Champion(digest, root / digest, None)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(mend, "means", means)
        monkeypatch.setattr(hands, "means", means)
        monkeypatch.setattr(hands, "ensure_champion", champion)
        monkeypatch.setattr(mend, "_newest", lambda *_: (1, ["s"] * self.samples))
        monkeypatch.setattr(mend, "_compare", lambda *_: self.comparison)
        self.deploy(self.new)

    def means(self) -> Means:
        return Means(
            self.settings,
            self.ledger,
            self.servers,
            fetch=lambda digest: self.settings.drafts_folder / digest,
            promote=self.promote,
            sleep=lambda _: None,
        )

    def promote(self, digest: str) -> None:
        self.alias = digest

    def deploy(self, digest: str) -> None:
        roll_out(self.means(), Order(digest, "run r", "better"), fence=lambda _: None, watched=False)

    def suspect(self, why: str = "acceptance length fell") -> None:
        memory = Memory(draft=self.new, before=self.old, suspected=why)
        self.ledger.controls.put("demo", MEMORY, memory.to_json())

    def mend(self) -> Mended:
        return mend.mend(self.settings, self.ledger)

    def memory(self) -> Memory:
        return Memory.from_json(self.ledger.controls.get("demo", MEMORY))

    def agreed(self) -> str:
        pointed = deployed_draft(self.settings)
        assert pointed is not None
        assert {server.draft for server in self.servers} == {self.alias} == {pointed.name}
        assert self.ledger.champion("demo") == self.alias
        assert self.ledger.rollouts.unfinished("demo") is None
        return self.alias

    def actions(self) -> list[Action]:
        return [entry.action for entry in self.ledger.audit("demo")]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    world.ledger.close()


def test_where_nothing_is_wrong_nothing_is_done(world: World):
    before = world.actions()
    assert world.mend() == Mended([])
    assert world.agreed() == world.new and world.actions() == before


def test_a_server_with_another_draft_gets_the_champion(world: World):
    world.servers[1].draft = world.old
    assert "serves" in world.mend().done[0]
    assert world.agreed() == world.new and world.actions()[-1] is Action.MENDED
    assert world.mend().done == []


def test_all_servers_with_another_draft_get_the_champion(world: World):
    """A power cut: each came back with the draft that its own machine remembered."""
    for server in world.servers:
        server.draft = world.old
    mark_deployed(world.settings, world.old)
    world.alias = world.old
    assert len(world.mend().done) == 2
    assert world.agreed() == world.new


def test_a_server_that_refuses_is_named(world: World):
    world.servers[1].draft = world.old
    world.servers[1].reload = lambda digest: None  # type: ignore[method-assign]
    with pytest.raises(NotMended, match="http://s1 does not take the champion"):
        world.mend()


def test_a_dead_rollout_is_undone(world: World):
    world.ledger.rollouts.begin("demo", Order(world.old, "run r", "x"), world.new, ["http://s0"])
    world.servers[0].draft = world.old
    assert "settled" in world.mend().done[0]
    assert world.agreed() == world.new
    assert world.ledger.rollouts.history("demo")[-1].step is Step.UNDONE


def test_a_champion_that_replays_worse_is_rolled_back_and_barred(world: World):
    world.suspect()
    world.comparison = compared(0.3, 0.1)
    mended = world.mend()
    assert "rolled back" in mended.done[0] and world.agreed() == world.old
    barred = world.ledger.guard.barred("demo", world.new)
    assert barred is not None and "+30.0%" in barred.reason and "fell" in barred.reason
    assert Action.ROLLED_BACK in world.actions()


@pytest.mark.parametrize("lower", [0.019, -0.2])
def test_a_champion_that_replays_no_worse_is_cleared(world: World, lower: float):
    world.suspect()
    world.comparison = compared(0.05, lower)
    assert "cleared" in world.mend().done[0] and world.agreed() == world.new
    assert world.memory().suspected == "" and world.actions()[-1] is Action.CLEARED


def test_what_the_sensor_saw_meanwhile_is_kept(world: World, monkeypatch: pytest.MonkeyPatch):
    world.suspect()
    request = {"at": 5.0, "tenant": "a", "rounds": 2, "accepted": 1}

    def compare(*_: Any) -> Comparison:
        seen = replace(world.memory(), first=[request])
        world.ledger.controls.put("demo", MEMORY, seen.to_json())
        return compared(0.0, -0.1)

    monkeypatch.setattr(mend, "_compare", compare)
    world.mend()
    assert world.memory().first == [request] and world.memory().suspected == ""


def test_few_samples_leave_the_suspicion(world: World):
    world.suspect()
    world.samples = LEAST_SAMPLES - 1
    assert f"waits for {LEAST_SAMPLES} samples" in world.mend().done[0]
    assert world.memory().suspected and world.agreed() == world.new


def test_what_few_samples_do_not_decide_waits_for_more(world: World):
    world.suspect()
    world.samples = world.settings.watch.replay_samples - 1
    world.comparison = compared(0.05, -0.2)
    assert "undecided, waits for more samples" in world.mend().done[0]
    assert world.memory().suspected and world.agreed() == world.new
    world.comparison = compared(-0.2, -0.3)  # sure enough: clears on however few
    assert "cleared" in world.mend().done[0] and not world.memory().suspected


def test_nothing_to_go_back_to_clears(world: World):
    world.suspect()
    world.ledger.guard.bar("demo", world.old, "me", "broken")
    assert "no draft before it" in world.mend().done[0]
    assert world.agreed() == world.new and not world.memory().suspected


def test_a_champion_that_was_replaced_meanwhile_is_not_held_to_it(world: World):
    world.suspect()
    world.deploy(world.old)
    assert "another draft took its place" in world.mend().done[0]
    assert world.agreed() == world.old and not world.memory().suspected
