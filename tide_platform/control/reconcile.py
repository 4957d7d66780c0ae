"""What one tick of the sensor does: cut what is complete, and bring the ledger and the orchestrator to agree.

No cursor: all that a tick knows it reads from the ledger and from the runs, so a tick may die anywhere and
the next one does the same again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tide_platform.config import Settings
from tide_platform.control.backlog import folds
from tide_platform.control.drift import Drift
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State, WindowKey
from tide_platform.control.windows import Fall, Ref, Rule, cut


@dataclass(frozen=True)
class RunView:
    """What the orchestrator says of a run."""

    run_id: str
    status: str  # queued | starting | started | success | failure | canceled
    since: float  # Unix time, seconds, of its last change of status

    @property
    def finished(self) -> bool:
        return self.status in ("success", "failure", "canceled")


class Runs(Protocol):
    """The orchestrator's runs, as the tick needs them."""

    def of_attempt(self, key: WindowKey, attempt: int) -> RunView | None:
        """The newest run that the sensor asked for with this window and attempt."""
        ...

    def get(self, run_id: str) -> RunView | None: ...

    def end(self, run_id: str, message: str) -> None:
        """Mark a run that gives no sign of life as failed, so that it holds no slot."""
        ...

    def why(self, run_id: str) -> str:
        """Why a run failed, in one line."""
        ...


class Store(Protocol):
    """The dataset, as the tick needs it: one read of its tip, one of new rows' metadata when a window is
    complete.
    """

    def tip(self) -> tuple[int, int]:
        """(version, rows)."""
        ...

    def after(self, row_id: int, version: int) -> list[Ref]: ...


@dataclass
class Tick:
    """What a tick found. ``request``: the window whose current attempt should run now."""

    cut: list[WindowRecord] = field(default_factory=list)
    folded: list[WindowRecord] = field(default_factory=list)  # superseded or merged now
    request: WindowRecord | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        return "; ".join(self.notes) or "nothing to do"


def tick(
    settings: Settings, ledger: Ledger, store: Store, runs: Runs, clock: Callable[[], float] = time.time
) -> Tick:
    """Cut new windows, settle runs that ended or died, and name the window that should run next."""
    result = Tick()
    _cut(settings, ledger, store, result)
    _fold(settings, ledger, runs, result)
    records = ledger.open(settings.deployment)
    held = next((record for record in records if record.holder is not None), None)
    if held is not None:
        next_up = _settle_held(settings, ledger, runs, held, clock(), result)
    else:
        settled = (_settle_waiting(settings, ledger, runs, record, clock(), result) for record in records)
        next_up = next((record for record in settled if record is not None), None)
    if next_up is None or next_up.holder is not None or next_up.state.final:
        return result
    if (pause := _pause(settings, next_up, clock())) > 0:
        result.notes.append(f"{next_up.key}: attempt {next_up.attempt} in {pause:.0f} s")
        return result
    if runs.of_attempt(next_up.key, next_up.attempt) is None:
        result.request = next_up
        result.notes.append(
            f"{next_up.key}: attempt {next_up.attempt} of {settings.window.max_attempts} asked for"
        )
    return result


def _cut(settings: Settings, ledger: Ledger, store: Store, result: Tick) -> None:
    before = ledger.scan(settings.deployment)
    version, rows = store.tip()
    minimum = settings.window.min_samples
    rule = Rule(minimum, settings.window.min_tokens, _fall(settings, ledger))
    after, cuts = cut(
        settings.deployment, before, version, rows, lambda row_id: store.after(row_id, version), rule
    )
    if after != before:
        result.cut = [ledger.get(key) for key in ledger.cut(settings.deployment, before, after, cuts)]
    if not result.cut:
        waiting = min(minimum, after.pending + max(0, rows - after.rows))
        result.notes.append(
            f"{rows} rows at version {version}; at most {waiting} of {minimum} samples for a window"
        )


def _fall(settings: Settings, ledger: Ledger) -> Fall | None:
    """A fall of live acceptance that no window was cut for yet; of several, since the last."""
    samples = settings.window.drift_samples
    if samples is None:
        return None
    memory = Memory.from_json(ledger.controls.get(settings.deployment, MEMORY))
    last_cut = ledger.last_cut(settings.deployment)
    new = [drift for drift in memory.drifted.values() if drift["at"] > last_cut]
    if not new:
        return None
    text = "; ".join(str(Drift(**drift)) for drift in new)
    return Fall(text, max(drift["at"] for drift in new), samples)


def _fold(settings: Settings, ledger: Ledger, runs: Runs, result: Tick) -> None:
    """More than one window waits for its first run: ``window.policy`` says which of them are trained."""
    if settings.window.policy == "all":
        return
    owed = [record for record in ledger.windows(settings.deployment, [State.OWED]) if record.holder is None]
    if len(owed) < 2:
        return
    waiting = [record for record in owed if runs.of_attempt(record.key, record.attempt) is None]
    every = ledger.windows(settings.deployment)
    for fold in folds(settings.window.policy, waiting, every, settings.window.max_samples):
        into = ledger.get(fold.into.key)  # an earlier fold of this tick may have moved it
        ledger.fold(fold.gone, into, fold.state, fold.reason)
        result.folded += [ledger.get(record.key) for record in fold.gone]
        result.notes += [f"{record.key}: {fold.state}, {fold.reason}" for record in fold.gone]


def _pause(settings: Settings, record: WindowRecord, now: float) -> float:
    """Seconds until the current attempt may start: an outage must not use all attempts up at once."""
    if record.attempt == 1:
        return 0.0
    return record.updated_at + settings.window.retry_s * 2 ** (record.attempt - 2) - now


def _settle_held(
    settings: Settings, ledger: Ledger, runs: Runs, record: WindowRecord, now: float, result: Tick
) -> WindowRecord | None:
    """A run holds the window: leave it alone while it lives."""
    assert record.holder is not None
    run = runs.get(record.holder)
    silent = now - (record.seen_at or record.updated_at)
    if run is not None and not run.finished and silent <= settings.window.lease_s:
        result.notes.append(f"{record.key}: {record.state}, run {run.run_id}")
        return None
    if run is None and silent <= settings.window.lease_s:
        return None  # started outside this orchestrator, and alive
    if run is None:
        reason = (
            f"run {record.holder} is unknown to the orchestrator and gave no sign of life for {silent:.0f} s"
        )
    elif not run.finished:
        reason = f"run {run.run_id} gave no sign of life for {silent:.0f} s"
        runs.end(
            run.run_id, f"{record.key}: no sign of life for {silent:.0f} s; a new attempt takes its place"
        )
    else:
        reason = _ended(runs, run)
    return _release(settings, ledger, record, run, reason, result)


def _settle_waiting(
    settings: Settings, ledger: Ledger, runs: Runs, record: WindowRecord, now: float, result: Tick
) -> WindowRecord | None:
    """No run holds the window: is the one that was asked for still coming?"""
    run = runs.of_attempt(record.key, record.attempt)
    if run is None:
        return record
    waited = now - run.since
    if not run.finished:
        if run.status == "queued" or waited <= settings.window.start_timeout_s:
            result.notes.append(f"{record.key}: run {run.run_id} is {run.status}")
            return record
        runs.end(run.run_id, f"{record.key}: {run.status} for {waited:.0f} s without taking the window")
        reason = f"run {run.run_id} did not take the window within {waited:.0f} s"
    else:
        reason = _ended(runs, run)
    return _release(settings, ledger, record, run, reason, result)


def _ended(runs: Runs, run: RunView) -> str:
    if run.status == "canceled":
        return f"run {run.run_id} was cancelled"
    if run.status == "success":
        return f"run {run.run_id} ended without the window's last step"
    return f"run {run.run_id} failed: {runs.why(run.run_id)}"


def _release(
    settings: Settings, ledger: Ledger, record: WindowRecord, run: RunView | None, reason: str, result: Tick
) -> WindowRecord | None:
    """The attempt is over. A cancelled run was ended by a person: its window is not started again by
    itself.
    """
    retry = run is None or run.status != "canceled"
    after = ledger.release(record, reason, settings.window.max_attempts, retry)
    result.notes.append(
        f"{record.key}: {reason}; " + (f"now {after.state}" if after.state.final else "tried again")
    )
    return None if after.state is State.FAILED else after
