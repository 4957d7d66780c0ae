"""The sensor's tick against runs that die, never start, or end."""

from pathlib import Path

import pytest
from control_fakes import Data, Row, serve

from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory
from tide_platform.control.reconcile import RunView, Tick, tick
from tide_platform.control.states import State, WindowKey
from tide_platform.control.windows import Ref

KEY = WindowKey("demo", "w00001")


class FakeRuns:
    """An orchestrator that forgets nothing and starts nothing by itself."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[WindowKey, int], str] = {}
        self.views: dict[str, RunView] = {}
        self.ended: list[str] = []

    def add(self, key: WindowKey, attempt: int, status: str, since: float) -> str:
        run_id = f"run-{attempt}"
        self.attempts[key, attempt] = run_id
        self.views[run_id] = RunView(run_id, status, since)
        return run_id

    def of_attempt(self, key: WindowKey, attempt: int) -> RunView | None:
        return self.get(self.attempts.get((key, attempt), ""))

    def get(self, run_id: str) -> RunView | None:
        return self.views.get(run_id)

    def end(self, run_id: str, message: str) -> None:
        self.ended.append(message)
        self.views[run_id] = RunView(run_id, "failure", self.views[run_id].since)

    def why(self, run_id: str) -> str:
        return "out of memory"


class World:
    def __init__(self, folder: Path):
        self.now = 1000.0
        self.settings = Settings()
        self.settings.window.min_samples = 10
        self.settings.window.retry_s = 0
        self.settings.window.policy = "all"
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db", clock=lambda: self.now)
        self.data, self.runs, self.tips = Data(), FakeRuns(), 0

    def tip(self) -> tuple[int, int]:
        self.tips += 1
        return 1 + len(self.data.rows), len(self.data.rows)

    def after(self, row_id: int, version: int) -> list[Ref]:
        return list(self.data.after(row_id))

    def land(self, rows: int) -> None:
        self.data.rows += [Row(len(self.data.rows) + i, captured_at=self.now) for i in range(rows)]

    def tick(self) -> Tick:
        return tick(self.settings, self.ledger, self, self.runs, lambda: self.now)


@pytest.fixture
def world(tmp_path: Path):
    world = World(tmp_path)
    yield world
    world.ledger.close()


def requested(result: Tick) -> tuple[str, int] | None:
    return (str(result.request.key), result.request.attempt) if result.request else None


def test_a_complete_window_is_asked_for_until_its_run_is_there(world: World):
    assert requested(world.tick()) is None
    world.land(12)
    assert requested(world.tick()) == ("demo/w00001", 1)
    assert requested(world.tick()) == ("demo/w00001", 1)  # the first tick died before the run was made
    world.runs.add(KEY, 1, "queued", world.now)
    assert requested(world.tick()) is None


def test_a_fall_of_acceptance_makes_a_window_of_fewer_samples(world: World):
    world.settings.window.drift_samples = 4
    world.land(5)
    assert requested(world.tick()) is None
    world.now += 1
    fall = {"slice": "all", "how": "recent", "before": 2.0, "now": 1.4, "requests": 30, "at": world.now}
    world.ledger.controls.put("demo", MEMORY, Memory(draft="d", drifted={"all": fall}).to_json())
    assert requested(world.tick()) is None, "what was captured before it tells nothing of the new traffic"
    world.land(3)
    assert requested(world.tick()) is None
    world.land(1)
    assert requested(world.tick()) == ("demo/w00001", 1)
    rule = world.ledger.get(KEY).rule or {}
    assert (rule["by"], rule["samples"], rule["samples_since_drift"]) == ("drift", 9, 4)
    assert "1.400" in rule["drift"] and rule["drift_samples"] == 4
    world.now += 1
    world.land(7)
    assert not world.tick().cut, "a fall has one window; the next one takes min_samples"
    world.land(3)
    assert [record.samples for record in world.tick().cut] == [10]


def test_a_fall_is_nothing_to_cut_by_unless_it_is_asked_for(world: World):
    fall = {"slice": "all", "how": "recent", "before": 2.0, "now": 1.4, "requests": 30, "at": world.now}
    world.ledger.controls.put("demo", MEMORY, Memory(draft="d", drifted={"all": fall}).to_json())
    world.land(9)
    assert not world.tick().cut


def test_a_tick_reads_the_store_at_most_twice(world: World):
    world.land(5000)
    world.tick()
    assert (world.tips, world.data.reads) == (1, 1)


def test_a_run_that_never_starts_is_given_up(world: World):
    world.land(10)
    world.tick()
    world.runs.add(KEY, 1, "starting", world.now)
    world.now += world.settings.window.start_timeout_s + 1
    assert requested(world.tick()) == ("demo/w00001", 2)
    assert world.runs.ended and "did not take the window" in (world.ledger.get(KEY).reason or "")


def test_a_queued_run_may_wait(world: World):
    world.land(10)
    world.tick()
    world.runs.add(KEY, 1, "queued", world.now)
    world.now += 1e6
    assert requested(world.tick()) is None and not world.runs.ended


def test_a_run_dropped_before_it_took_its_window_is_followed_by_another(world: World):
    world.land(10)
    world.tick()
    world.runs.add(KEY, 1, "failure", world.now)
    assert requested(world.tick()) == ("demo/w00001", 2)


def test_a_run_that_died_without_a_word_is_given_up_after_the_lease(world: World):
    world.land(10)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run, 1)
    world.now += world.settings.window.lease_s - 1
    assert requested(world.tick()) is None
    world.now += 2
    assert requested(world.tick()) == ("demo/w00001", 2)
    assert "no sign of life" in world.runs.ended[0]


def test_a_run_that_lives_is_left_alone(world: World):
    world.land(10)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run, 1)
    for _ in range(10):
        world.now += world.settings.window.lease_s / 2
        assert world.ledger.beat(KEY, run)
        assert requested(world.tick()) is None


def test_a_failing_window_ends_after_its_attempts_and_the_next_one_runs(world: World):
    world.land(20)
    world.tick()
    for attempt in range(1, world.settings.window.max_attempts + 1):
        run = world.runs.add(KEY, attempt, "started", world.now)
        world.ledger.claim(KEY, run, attempt)
        world.runs.add(KEY, attempt, "failure", world.now)
        result = world.tick()
    record = world.ledger.get(KEY)
    assert (record.state, requested(result)) == (State.FAILED, None)
    assert record.reason is not None and "out of memory" in record.reason
    assert requested(world.tick()) == ("demo/w00002", 1)


def test_windows_that_land_faster_than_they_are_trained_are_merged(world: World):
    world.settings.window.policy = "merge"
    world.land(10)
    run = world.runs.add(KEY, 1, "started", world.now) if world.tick().request else ""
    world.ledger.claim(KEY, run, 1)
    world.land(20)
    result = world.tick()
    assert [(str(record.key), record.state) for record in result.folded] == [("demo/w00002", State.MERGED)]
    into = world.ledger.get(WindowKey("demo", "w00003"))
    assert (into.samples, into.after_row, into.last_row) == (20, 9, 29)
    assert world.ledger.get(WindowKey("demo", "w00002")).taken_by == "w00003"
    world.land(10)
    world.tick()
    last = world.ledger.get(WindowKey("demo", "w00004"))
    assert (last.samples, last.after_row, last.last_row) == (30, 9, 39)
    world.runs.add(KEY, 1, "success", world.now)
    assert world.ledger.get(KEY).state is State.RUNNING and world.ledger.get(KEY).samples == 10


def test_the_newest_window_alone_is_trained_where_that_is_wanted(world: World):
    world.settings.window.policy = "latest"
    world.land(40)
    result = world.tick()
    assert requested(result) == ("demo/w00004", 1)
    assert {record.state for record in result.folded} == {State.SUPERSEDED} and len(result.folded) == 3
    assert "demo/w00001: superseded, w00004 is newer" in result.message
    assert [entry.action for entry in world.ledger.audit("demo")] == ["superseded"] * 3
    assert world.ledger.claim(KEY, "by hand").state is State.RUNNING, "a hand may train it all the same"


def test_a_cancelled_run_is_not_started_again(world: World):
    world.land(10)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run, 1)
    world.runs.add(KEY, 1, "canceled", world.now)
    assert requested(world.tick()) is None
    assert world.ledger.get(KEY).state is State.FAILED


def test_a_rejected_window_is_final_though_its_run_failed(world: World):
    world.land(20)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run, 1)
    world.ledger.trained(KEY, run, challenger="new", parent="old", mlflow_run="m")
    world.ledger.judged(KEY, run, champion="old", passed=False, evidence={}, reason="worse")
    world.runs.add(KEY, 1, "failure", world.now)
    assert requested(world.tick()) == ("demo/w00002", 1)
    assert world.ledger.get(KEY).state is State.REJECTED


def test_one_window_after_the_other(world: World):
    world.land(30)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run, 1)
    assert requested(world.tick()) is None
    world.ledger.trained(KEY, run, challenger="new", parent="old", mlflow_run="m")
    world.ledger.judged(KEY, run, champion="old", passed=True, evidence={}, reason="better")
    assert requested(world.tick()) is None
    serve(world.ledger, KEY, run)
    assert requested(world.tick()) == ("demo/w00002", 1)


def test_a_run_that_did_only_part_of_the_work_is_followed_by_one_that_ends_it(world: World):
    world.land(10)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run)
    world.ledger.trained(KEY, run, challenger="new", parent="old", mlflow_run="m")
    world.runs.add(KEY, 1, "success", world.now)
    assert requested(world.tick()) == ("demo/w00001", 2)
    assert world.ledger.get(KEY).state is State.TRAINED


def test_an_orchestrator_that_forgot_its_runs_loses_no_window(world: World):
    world.land(10)
    world.tick()
    run = world.runs.add(KEY, 1, "started", world.now)
    world.ledger.claim(KEY, run, 1)
    world.runs = FakeRuns()
    assert requested(world.tick()) is None
    world.now += world.settings.window.lease_s + 1
    assert requested(world.tick()) == ("demo/w00001", 2)


def test_an_outage_does_not_use_all_attempts_up_at_once(world: World):
    world.settings.window.retry_s = 15
    world.land(10)
    world.tick()
    for attempt, pause in ((1, 15), (2, 30)):
        world.runs.add(KEY, attempt, "failure", world.now)
        assert requested(world.tick()) is None
        world.now += pause - 1
        assert requested(world.tick()) is None
        world.now += 1
        assert requested(world.tick()) == ("demo/w00001", attempt + 1)
