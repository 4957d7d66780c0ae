"""The ledger's transitions, and that no order of events loses or doubles a window."""

import multiprocessing
from pathlib import Path

import pytest
from control_fakes import serve
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tide_platform.control.audit import Action
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import Cut, Scan, StaleRun, UnknownWindow, WindowClosed, WindowHeld
from tide_platform.control.states import FOLLOWS, State, WindowKey

ATTEMPTS = 3


def make_ledger(folder: Path, windows: int = 1) -> Ledger:
    ledger = Ledger(f"sqlite:///{folder}/ledger.db")
    cuts = [Cut(10 * i - 1, 10 * i + 9, 7, 10, 100) for i in range(windows)]
    ledger.cut("demo", Scan(), Scan(7, 10 * windows, 10 * windows - 1, 0), cuts)
    return ledger


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = make_ledger(tmp_path, windows=2)
    yield ledger
    ledger.close()


KEY, OTHER = WindowKey("demo", "w00001"), WindowKey("demo", "w00002")


def train(ledger: Ledger, key: WindowKey, run: str, attempt: int | None = None) -> None:
    ledger.claim(key, run, attempt)
    ledger.trained(key, run, challenger="new", parent="old", mlflow_run="m")


def test_a_window_goes_from_owed_to_deployed(ledger: Ledger):
    assert ledger.get(KEY).state is State.OWED
    train(ledger, KEY, "run-1", 1)
    ledger.judged(KEY, "run-1", champion="old", passed=True, evidence={"k": 2}, reason="better")
    assert ledger.get(KEY).state is State.GATED
    serve(ledger, KEY, "run-1")
    record = ledger.get(KEY)
    assert (record.state, record.holder, record.run_id) == (State.DEPLOYED, None, "run-1")
    verdict = ledger.verdict("demo", "new", "old")
    assert verdict is not None and verdict.passed and verdict.evidence == {"k": 2}
    assert [row["served"] for row in ledger.deployments("demo")] == ["new"]


def test_a_rejected_window_is_at_its_end(ledger: Ledger):
    train(ledger, KEY, "run-1", 1)
    ledger.judged(KEY, "run-1", champion="old", passed=False, evidence={}, reason="worse")
    record = ledger.get(KEY)
    assert (record.state, record.holder, record.reason) == (State.REJECTED, None, "worse")
    with pytest.raises(WindowClosed):
        ledger.claim(KEY, "run-2", 1)
    assert OTHER in [each.key for each in ledger.open("demo")]


def test_a_challenger_that_live_traffic_refused_ends_its_window(ledger: Ledger):
    ledger.claim(KEY, "run-1", 1)
    ledger.trained(KEY, "run-1", challenger="new", parent="old", mlflow_run="m")
    ledger.judged(KEY, "run-1", champion="old", passed=True, evidence={}, reason="better")
    ledger.refused(KEY, "run-1", "worse on live traffic")
    record = ledger.get(KEY)
    assert (record.state, record.holder, record.attempt) == (State.REJECTED, None, 1)
    assert record.reason == "worse on live traffic"
    assert ledger.audit(KEY.deployment)[-1].action is Action.REJECTED


def test_one_window_of_a_deployment_runs_at_a_time(ledger: Ledger):
    ledger.claim(KEY, "run-1", 1)
    with pytest.raises(WindowHeld, match="run-1"):
        ledger.claim(OTHER, "run-2", 1)
    with pytest.raises(WindowHeld):
        ledger.claim(KEY, "run-2", 1)
    assert ledger.claim(KEY, "run-1", 1).holder == "run-1"  # its later steps


def test_a_late_worker_of_an_earlier_attempt_is_refused(ledger: Ledger):
    ledger.release(ledger.get(KEY), "never came", ATTEMPTS)
    with pytest.raises(StaleRun):
        ledger.claim(KEY, "run-1", 1)
    ledger.claim(KEY, "run-2", 2)


def test_a_run_that_was_given_up_changes_nothing_more(ledger: Ledger):
    train(ledger, KEY, "run-1", 1)
    ledger.release(ledger.get(KEY), "silent", ATTEMPTS)
    assert ledger.beat(KEY, "run-1") is False
    with pytest.raises(StaleRun):
        ledger.judged(KEY, "run-1", champion="old", passed=True, evidence={}, reason="")
    assert ledger.verdict("demo", "new", "old") is None
    record = ledger.claim(KEY, "run-2", 2)  # its checkpoint is kept
    assert (record.state, record.challenger) == (State.TRAINED, "new")


def test_attempts_are_bounded_and_the_reason_is_kept(ledger: Ledger):
    for attempt in range(1, ATTEMPTS + 1):
        ledger.claim(KEY, f"run-{attempt}", attempt)
        ledger.release(ledger.get(KEY), f"reason {attempt}", ATTEMPTS)
    record = ledger.get(KEY)
    assert (record.state, record.reason, record.attempt) == (State.FAILED, "reason 3", ATTEMPTS)


def test_a_person_may_take_a_failed_window_up_where_it_stopped(ledger: Ledger):
    train(ledger, KEY, "run-1", 1)
    ledger.judged(KEY, "run-1", champion="old", passed=True, evidence={}, reason="")
    ledger.release(ledger.get(KEY), "server down", 1)
    with pytest.raises(WindowClosed):
        ledger.claim(KEY, "run-2", 1)
    record = ledger.claim(KEY, "run-2")
    assert (record.state, record.attempt, record.challenger) == (State.GATED, 2, "new")


def test_release_leaves_a_window_alone_that_moved_since(ledger: Ledger):
    seen = ledger.get(KEY)
    ledger.claim(KEY, "run-1", 1)
    assert ledger.release(seen, "outdated", ATTEMPTS).holder == "run-1"


def test_cutting_twice_from_the_same_scan_enters_windows_once(ledger: Ledger):
    before = ledger.scan("demo")
    after = Scan(9, 30, 29, 0)
    cut = [Cut(19, 29, 9, 10, 100)]
    assert ledger.cut("demo", before, after, cut) == [WindowKey("demo", "w00003")]
    assert ledger.cut("demo", before, after, cut) == []
    assert ledger.cut("other", Scan(), after, cut) == [WindowKey("other", "w00001")]


def test_an_unknown_window_is_named(ledger: Ledger):
    with pytest.raises(UnknownWindow, match="demo/w00009"):
        ledger.get(WindowKey("demo", "w00009"))


def _claim(url: str, run: str, results: "multiprocessing.Queue[str]") -> None:
    ledger = Ledger(url)
    try:
        ledger.claim(KEY, run, 1)
        results.put(run)
    except WindowHeld:
        results.put("refused")


def test_of_many_processes_one_gets_the_window(tmp_path: Path):
    make_ledger(tmp_path).close()
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = context.Queue()
    url = f"sqlite:///{tmp_path}/ledger.db"
    processes = [context.Process(target=_claim, args=(url, f"run-{i}", results)) for i in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert outcomes.count("refused") == 3


class LedgerMachine(RuleBasedStateMachine):
    """Runs and ticks in any order: each state follows from the one before as the table says."""

    runs = Bundle("runs")

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self.ledger = make_ledger(Path(self._folder.name))
        self.seen = self.ledger.get(KEY)
        self.count = 0
        self.reopened = 0

    def teardown(self) -> None:
        self.ledger.close()
        self._folder.cleanup()

    @rule(target=runs, by_hand=st.booleans())
    def start(self, by_hand: bool):
        self.count += 1
        return f"run-{self.count}", None if by_hand else self.ledger.get(KEY).attempt

    @rule(run=runs)
    def claim(self, run: tuple[str, int | None]):
        before = self.ledger.get(KEY)
        try:
            after = self.ledger.claim(KEY, *run)
        except (StaleRun, WindowHeld, WindowClosed):
            assert self.ledger.get(KEY) == before
        else:
            assert after.holder == run[0] and not after.state.final
            self.reopened += before.state.final

    @rule(run=runs, passed=st.booleans(), step=st.sampled_from(["trained", "judged", "deployed"]))
    def work(self, run: tuple[str, int | None], passed: bool, step: str):
        before = self.ledger.get(KEY)
        try:
            if step == "trained":
                self.ledger.trained(KEY, run[0], challenger="new", parent="old", mlflow_run="m")
            elif step == "judged":
                self.ledger.judged(KEY, run[0], champion="old", passed=passed, evidence={}, reason="")
            elif before.state is State.GATED and before.holder == run[0]:
                serve(self.ledger, KEY, run[0])
            else:
                return
        except StaleRun:
            assert self.ledger.get(KEY) == before
        else:
            assert before.holder == run[0]

    @precondition(lambda self: not self.ledger.get(KEY).state.final)
    @rule(retry=st.booleans())
    def release(self, retry: bool):
        self.ledger.release(self.ledger.get(KEY), "why", ATTEMPTS, retry)

    @invariant()
    def states_follow(self):
        now = self.ledger.get(KEY)
        assert now.state is self.seen.state or now.state in FOLLOWS[self.seen.state]
        assert now.attempt <= ATTEMPTS + self.reopened
        if now.state.final:
            assert now.holder is None
        if now.state in (State.TRAINED, State.GATED, State.DEPLOYED, State.REJECTED):
            assert now.challenger == "new"
        if now.state is State.RUNNING:
            assert now.holder is not None
        self.seen = now


LedgerMachine.TestCase.settings = hypothesis_settings(max_examples=25, stateful_step_count=25, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
