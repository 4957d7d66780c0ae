"""Fenced rollouts: whatever dies or lies, servers, pointer, alias and ledger end up with one draft."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from control_fakes import make_draft

from tide_platform.cluster.discovery import ServersMissing
from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.control.audit import Action
from tide_platform.control.guard import Barred
from tide_platform.control.ledger import Ledger
from tide_platform.control.rollout import (
    Deployed,
    Means,
    NotJudged,
    NotServed,
    StagedDraftBroken,
    WorseLive,
    roll_out,
    settle,
)
from tide_platform.control.rollouts import Order, Rollout, Step
from tide_platform.control.told import of_rollout
from tide_platform.serving import deployment_lock as lock_module
from tide_platform.serving.client import ServerUnreachable
from tide_platform.serving.deployment_lock import DeploymentBusy, deployment_lock
from tide_platform.serving.drafts import deployed_draft, mark_deployed
from tide_platform.serving.fleet import NothingServed, ServersDisagree, TargetChanged


class Killed(BaseException):
    """The process died here."""


class FakeServer:
    """Serves a digest; ``refuses`` and ``reply`` say how a reload goes wrong. Between two looks at its
    requests some end, of an acceptance that the served draft brings.
    """

    def __init__(self, number: int, digest: str, touched: Callable[[], None]):
        self.base_url = f"http://server-{number}"
        self.digest, self.touched = digest, touched
        self.log: list[str] = []
        self.refuses: set[str] = set()
        self.reply: dict[str, Any] = {"pause_s": 0.1 * number, "weights_checksum": "w"}
        self.lose_reply = False
        self.accepted: dict[str, int] = {}  # of ten rounds, by draft
        self.traffic = 0  # requests that end between two looks
        self.finished: list[dict[str, Any]] = []

    def status(self) -> dict[str, Any]:
        self.touched()
        return {"draft_digest": self.digest}

    def requests(self, after: int = 0) -> dict[str, Any]:
        self.touched()
        for _ in range(self.traffic):
            self.finished.append(
                {
                    "number": len(self.finished) + 1,
                    "draft": self.digest,
                    "tenant": "ann",
                    "concurrency": 2.0,
                    "straddles": False,
                    "rounds": 10,
                    "accepted": self.accepted.get(self.digest, 10),
                    "token_ms": 20.0,
                    "reason": "stop",
                }
            )
        new = self.finished[after:]
        return {"requests": new[:50], "last": len(self.finished)}

    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]:
        self.touched()
        self.log.append(digest)
        assert draft_digest(path) == digest
        if digest not in self.refuses:
            self.digest = digest
        self.touched()  # the reply is lost
        if self.lose_reply:
            raise ServerUnreachable("http://server", TimeoutError("read"))
        return {"ok": True, "target_checksum_before": "t", "target_checksum_after": "t", **self.reply}


class World:
    def __init__(self, folder: Path, servers: int = 1):
        self.settings = Settings(state=folder)
        self.settings.rollout.watch_seconds, self.settings.rollout.watch_requests = 30, 40
        root = self.settings.drafts_folder
        self.old, self.new = make_draft(root, "old"), make_draft(root, "new")
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db")
        self.touches, self.die_at = 0, -1
        self.servers = [FakeServer(number, self.old, self.touched) for number in range(1, servers + 1)]
        self.passed = {(self.new, self.old)}
        self.alias, self.now = self.old, 0.0
        self.states: dict[str, str] = {}  # what a registry was told last, by draft
        mark_deployed(self.settings, self.old)

    def touched(self) -> None:
        """Whatever a rollout does to the world passes here, before it is done."""
        self.touches += 1
        if self.touches == self.die_at:
            raise Killed

    def means(self) -> Means:
        return Means(
            self.settings,
            self.ledger,
            self.servers,
            fetch=lambda digest: self.settings.drafts_folder / digest,
            promote=self.promote,
            told=self.told,
            complete=lambda: self.complete(),
            sleep=self.sleep,
            monotonic=lambda: self.now,
        )

    def complete(self) -> None: ...

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def promote(self, digest: str) -> None:
        self.touched()
        self.alias = digest
        self.touched()

    def told(self, rollout: Rollout, served: bool, evidence: Mapping[str, Any]) -> None:
        self.touched()
        for digest, told in of_rollout(rollout, served, evidence, 1e9).items():
            self.states[digest] = told.tags["state"]
            self.touched()

    def fence(self, champion: str) -> None:
        self.ledger.guard.check("demo", self.new)
        if champion != self.new and (self.new, champion) not in self.passed:
            raise NotJudged(self.new, champion)

    def deploy(self, **more: Any) -> Deployed:
        order = Order(self.new, "run r", "better", window=None, run_id="r")
        return roll_out(self.means(), order, fence=self.fence, **more)

    def agreed(self) -> str:
        """The draft that everything agrees on."""
        pointed = deployed_draft(self.settings)
        assert pointed is not None
        served = {server.digest for server in self.servers}
        assert served == {self.alias} == {pointed.name}
        assert self.ledger.rollouts.unfinished("demo") is None
        history = self.ledger.deployments("demo")
        assert (history[-1]["served"] if history else self.old) == self.alias
        if self.ledger.rollouts.history("demo"):
            assert [draft for draft, state in self.states.items() if state == "served"] == [self.alias]
        return self.alias


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.ledger.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, servers=4)
    yield world
    world.ledger.close()


def test_a_judged_challenger_is_served_and_promoted(world: World):
    deployed = world.deploy()
    assert world.agreed() == world.new
    assert (deployed.previous, deployed.pause_s) == (world.old, pytest.approx(0.1))
    (row,) = world.ledger.deployments("demo")
    assert (row["previous"], row["run_id"], row["window"]) == (world.old, "r", None)
    (entry,) = world.ledger.audit("demo")
    assert (entry.action, entry.digest, entry.actor) == (Action.DEPLOYED, world.new, "run r")


def test_a_second_deployment_only_finds_it_done(world: World):
    world.deploy()
    again = world.deploy()
    assert (again.previous, world.servers[0].log) == (None, [world.new])
    assert world.agreed() == world.new


def test_a_verdict_against_another_champion_does_not_count(world: World):
    world.servers[0].digest = make_draft(world.settings.drafts_folder, "other")
    with pytest.raises(NotJudged, match="judged again"):
        world.deploy()
    assert (world.alias, world.servers[0].log) == (world.old, [])


def test_a_lost_reply_is_read_back(world: World):
    world.servers[0].lose_reply = True
    world.deploy()
    assert world.agreed() == world.new


def test_a_refused_reload_moves_nothing(world: World):
    world.servers[0].refuses = {world.new}
    with pytest.raises(NotServed, match="is served again and the alias was not moved"):
        world.deploy()
    assert world.agreed() == world.old
    assert [each.step for each in world.ledger.rollouts.history("demo")] == [Step.UNDONE]


def test_a_server_that_serves_something_else_gets_the_previous_draft_back(world: World):
    server, real = world.servers[0], world.servers[0].reload_draft

    def garble(path: Path, digest: str) -> dict[str, Any]:
        reply = real(path, digest)
        if digest == world.new:
            server.digest = "garbled"
        return reply

    server.reload_draft = garble  # type: ignore[method-assign]
    with pytest.raises(NotServed, match="reads back garbled"):
        world.deploy()
    assert world.agreed() == world.old


def test_a_changed_target_is_an_alarm(world: World):
    world.servers[0].reply = {"target_checksum_after": "x"}
    with pytest.raises(TargetChanged, match="restart the server"):
        world.deploy()
    assert world.alias == world.old
    world.servers[0].reply = {}
    assert settle(world.means()) is not None and world.agreed() == world.old


def test_broken_files_never_reach_the_server(world: World):
    (world.settings.drafts_folder / world.new / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(StagedDraftBroken):
        world.deploy()
    assert world.servers[0].log == [] and world.agreed() == world.old


def test_a_server_without_a_draft_or_servers_that_differ_are_named(fleet: World):
    fleet.servers[2].digest = ""
    with pytest.raises(NothingServed, match="server-3 serves no draft"):
        fleet.deploy()
    fleet.servers[2].digest = fleet.new
    with pytest.raises(ServersDisagree, match="different drafts"):
        fleet.deploy()


def test_missing_servers_stop_a_new_draft_but_not_the_way_back(fleet: World):
    def missing() -> None:
        raise ServersMissing("tide-sglang", 3, 4, {"tide-sglang-3": "Pending"})

    fleet.complete = missing  # type: ignore[method-assign]
    with pytest.raises(ServersMissing):
        fleet.deploy()
    assert fleet.servers[0].log == [] and fleet.ledger.rollouts.unfinished("demo") is None
    back = Order(fleet.new, "ann@host", "worse", Action.ROLLED_BACK)
    roll_out(fleet.means(), back, fence=lambda _: None, watched=False)
    assert fleet.agreed() == fleet.new


def test_the_canary_goes_first_and_the_others_in_waves(fleet: World):
    order: list[str] = []
    for server in fleet.servers:
        real = server.reload_draft

        def reload(path: Path, digest: str, server: FakeServer = server, real: Any = real) -> dict[str, Any]:
            order.append(server.base_url[-1])
            return real(path, digest)

        server.reload_draft = reload  # type: ignore[method-assign]
    deployed = fleet.deploy()
    assert order == ["1", "2", "3", "4"] and fleet.agreed() == fleet.new
    assert deployed.pause_s == pytest.approx(0.4), "the longest"
    assert len(deployed.servers) == 4


def test_a_server_of_a_later_wave_that_refuses_undoes_all(fleet: World):
    fleet.servers[3].refuses = {fleet.new}
    with pytest.raises(NotServed, match="server-4"):
        fleet.deploy()
    assert fleet.agreed() == fleet.old and fleet.servers[0].log == [fleet.new, fleet.old]


def test_a_draft_that_is_worse_on_live_traffic_is_undone_and_barred(world: World):
    server = world.servers[0]
    server.traffic, server.accepted = 10, {world.old: 10, world.new: 0}
    server.requests()  # there was traffic before
    for _ in range(20):
        server.requests()
    with pytest.raises(WorseLive, match="acceptance length is at most"):
        world.deploy()
    assert world.agreed() == world.old
    with pytest.raises(Barred, match="acceptance length"):
        world.deploy()
    assert [entry.action for entry in world.ledger.audit("demo")] == [Action.ROLLED_BACK, Action.BARRED]
    evidence = world.ledger.rollouts.history("demo")[0].evidence
    assert evidence["watched"]["challenger"]["accepted"] == 0


def test_the_other_servers_are_the_yardstick_where_there_are_some(fleet: World):
    """Traffic got harder for all: the canary is no worse than the others."""
    for server in fleet.servers:
        server.traffic, server.accepted = 5, {fleet.old: 10, fleet.new: 1}
        for _ in range(30):
            server.requests()
        server.accepted[fleet.old] = 1
    deployed = fleet.deploy()
    assert fleet.agreed() == fleet.new
    assert deployed.watched is not None and deployed.watched["challenger"]["requests"] >= 40


def test_without_traffic_nothing_is_waited_for_long(world: World):
    world.deploy()
    assert world.now == world.settings.rollout.idle_seconds


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("next_run", ["settles", "deploys"])
def test_a_kill_at_any_touch_ends_in_agreement(tmp_path: Path, servers: int, next_run: str):
    """Of a good draft. What the ledger writes is killed before and after as well."""
    ends: set[str] = set()
    for kill in itertools.count(1):
        world = World(tmp_path / f"{kill}", servers)
        _touch_ledger_and_pointer(world)
        world.die_at = kill
        try:
            world.deploy()
            died = False
        except Killed:
            died = True
        world.die_at = -1
        if next_run == "deploys":
            world.deploy()
            assert world.agreed() == world.new, f"killed at touch {kill}"
        else:
            settle(world.means())
            name = "new" if world.agreed() == world.new else "old"
            ends.add(name)
        world.ledger.close()
        if not died:
            break
    assert kill > 12
    assert next_run == "deploys" or ends == {"old", "new"}


def test_a_kill_while_it_is_undone_ends_in_agreement(tmp_path: Path):
    for kill in itertools.count(1):
        world = World(tmp_path / f"{kill}", 3)
        _touch_ledger_and_pointer(world)
        world.servers[2].refuses = {world.new}
        world.die_at = kill
        try:
            world.deploy()
        except Killed:
            died = True
        except NotServed:
            died = False
        world.die_at = -1
        settle(world.means())
        assert world.agreed() == world.old, f"killed at touch {kill}"
        world.ledger.close()
        if not died:
            break
    assert kill > 15


def _touch_ledger_and_pointer(world: World) -> None:
    """Dying between, before and after the ledger's transactions."""
    database = world.ledger._database
    real = database.write

    def write() -> Any:
        import contextlib

        @contextlib.contextmanager
        def block() -> Iterator[Any]:
            world.touched()
            with real() as connection:
                yield connection
            world.touched()

        return block()

    database.write = write  # type: ignore[method-assign]
    fetch = world.means

    def means() -> Means:
        made = fetch()
        inner = made.fetch

        def touched_fetch(digest: str) -> Path:
            world.touched()
            return inner(digest)

        made.fetch = touched_fetch
        return made

    world.means = means  # type: ignore[method-assign]


def test_a_server_that_is_gone_leaves_the_rollout_to_be_settled_later(fleet: World):
    fleet.servers[3].refuses = {fleet.new}
    fleet.servers[1].refuses = {fleet.old}
    with pytest.raises(TideError, match="does not take the previous draft back"):
        fleet.deploy()
    assert fleet.ledger.rollouts.unfinished("demo") is not None
    fleet.servers[1].refuses = set()
    settle(fleet.means())
    assert fleet.agreed() == fleet.old


def _hold_lock(settings: Settings, ready: Any, done: Any) -> None:
    with deployment_lock(settings):
        ready.set()
        done.wait(20)


def test_one_process_deploys_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock_module, "LOCK_WAIT_S", 0.2)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold_lock, args=(world.settings, ready, done))
    process.start()
    try:
        assert ready.wait(20)
        with pytest.raises(DeploymentBusy):
            world.deploy()
    finally:
        done.set()
        process.join()
    world.deploy()


def test_a_machine_waits_for_another_that_deploys_on_the_same_ledger(ledger_url: str):
    first, second = Ledger(ledger_url), Ledger(ledger_url)
    with first.lock("rollout:demo", 1):
        if ledger_url.startswith("postgresql"):
            with pytest.raises(TideError, match="locked for"), second.lock("rollout:demo", 0.3):
                pass
        with second.lock("rollout:other", 1):
            pass
    with second.lock("rollout:demo", 1):
        pass
    first.close()
    second.close()
