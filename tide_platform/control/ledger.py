"""The ledger: what is owed, who works on it, how it ended. A cursor is not a work ledger (design 4.6).

Every transition is compare-and-set on (state, attempt, holder): of two runs that believe they own a window,
one gets :class:`WindowHeld` or :class:`StaleRun` and must stop.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, func, insert, select, update

from tide_platform.control import audit, tables
from tide_platform.control.audit import Action, Entry
from tide_platform.control.controls import Controls
from tide_platform.control.database import Database
from tide_platform.control.figures import Figures
from tide_platform.control.guard import Guard
from tide_platform.control.history import History
from tide_platform.control.records import (
    Cut,
    Scan,
    StaleRun,
    UnknownWindow,
    VerdictRecord,
    WindowClosed,
    WindowHeld,
    WindowRecord,
)
from tide_platform.control.rollouts import Rollout, Rollouts
from tide_platform.control.states import FOLLOWS, OPEN, REOPENS, State, WindowKey, window_name

_W = tables.windows


class Ledger:
    """The windows of all deployments in one database.

    ``url``: an SQLAlchemy URL; ``clock`` gives Unix time in seconds.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.time):
        self._database = Database(url)
        self._clock = clock
        self.guard = Guard(self._database, clock)
        self.rollouts = Rollouts(self._database, clock)
        self.history = History(self._database, clock)
        self.controls = Controls(self._database, clock)
        self.figures = Figures(self._database)

    def close(self) -> None:
        self._database.close()

    def lock(self, name: str, wait_s: float) -> AbstractContextManager[None]:
        """See :meth:`Database.lock`."""
        return self._database.lock(name, wait_s)

    # --- cutting

    def scan(self, deployment: str) -> Scan:
        """How far the deployment's dataset was cut; the start when nothing was."""
        with self._database.read() as db:
            return _scan(db, deployment)

    def cut(self, deployment: str, before: Scan, after: Scan, cuts: Iterable[Cut]) -> list[WindowKey]:
        """Enter new windows as owed. Nothing is entered when another tick was first (``before`` is
        outdated).
        """
        now = self._clock()
        with self._database.write() as db:
            if _scan(db, deployment) != before:
                return []
            known = len(db.execute(select(_W.c.window).where(_W.c.deployment == deployment)).all())
            table = tables.scans
            if not db.execute(
                update(table).where(table.c.deployment == deployment).values(**asdict(after))
            ).rowcount:
                db.execute(insert(table).values(deployment=deployment, **asdict(after)))
            keys = []
            for index, cut in enumerate(cuts, start=known + 1):
                key = WindowKey(deployment, window_name(index))
                times = {"created_at": now, "updated_at": now}
                owed = {
                    "deployment": deployment,
                    "window": key.window,
                    "state": State.OWED.value,
                    "attempt": 1,
                }
                db.execute(insert(_W).values(**owed, **asdict(cut), **times))
                keys.append(key)
            return keys

    # --- reading

    def get(self, key: WindowKey) -> WindowRecord:
        """Raises :class:`UnknownWindow`."""
        with self._database.read() as db:
            return _get(db, key)

    def windows(self, deployment: str, states: Iterable[State] = State) -> list[WindowRecord]:
        """The deployment's windows in these states, oldest first."""
        query = select(_W).where(_W.c.deployment == deployment, _W.c.state.in_([s.value for s in states]))
        with self._database.read() as db:
            return [_record(row) for row in db.execute(query.order_by(_W.c.window))]

    def open(self, deployment: str) -> list[WindowRecord]:
        """The windows that are not at an end, oldest first."""
        return self.windows(deployment, OPEN)

    def last_cut(self, deployment: str) -> float:
        """When the newest window was cut (Unix time, seconds); 0 where none was."""
        query = select(func.max(_W.c.created_at)).where(_W.c.deployment == deployment)
        with self._database.read() as db:
            return db.execute(query).scalar() or 0.0

    def verdict(self, deployment: str, challenger: str, champion: str) -> VerdictRecord | None:
        """The last verdict on this challenger against this champion."""
        table = tables.verdicts
        pair = (table.c.challenger == challenger, table.c.champion == champion)
        query = select(table).where(table.c.deployment == deployment, *pair).order_by(table.c.id.desc())
        with self._database.read() as db:
            row = db.execute(query.limit(1)).first()
        return _verdict_record(row) if row else None

    def verdicts_of(self, key: WindowKey) -> list[VerdictRecord]:
        """All verdicts of a window, oldest first."""
        table = tables.verdicts
        where = (table.c.deployment == key.deployment, table.c.window == key.window)
        with self._database.read() as db:
            return [
                _verdict_record(row) for row in db.execute(select(table).where(*where).order_by(table.c.id))
            ]

    def last_verdicts(self, deployment: str, most: int) -> list[VerdictRecord]:
        """The deployment's newest verdicts, oldest first."""
        table = tables.verdicts
        query = select(table).where(table.c.deployment == deployment).order_by(table.c.id.desc())
        with self._database.read() as db:
            return [_verdict_record(row) for row in db.execute(query.limit(most))][::-1]

    def deployments(self, deployment: str) -> list[dict[str, Any]]:
        """The deployment's history, oldest first: columns of ``tables.deployments``."""
        table = tables.deployments
        query = select(table).where(table.c.deployment == deployment).order_by(table.c.id)
        with self._database.read() as db:
            return [dict(row._mapping) for row in db.execute(query)]

    def champion(self, deployment: str) -> str | None:
        """Digest of the draft that was deployed last; None before the first deployment."""
        table = tables.deployments
        query = select(table.c.served).where(table.c.deployment == deployment).order_by(table.c.id.desc())
        with self._database.read() as db:
            return db.execute(query.limit(1)).scalar()

    # --- a run's transitions

    def claim(self, key: WindowKey, run_id: str, attempt: int | None = None) -> WindowRecord:
        """Take a window for a run, or find that the run has it already; an owed one becomes running.

        ``attempt`` is the one that the sensor asked for; None marks a run started by hand, which may also
        take a failed window up where it stopped, and train a rejected or superseded one anew.
        Raises :class:`UnknownWindow`, :class:`WindowHeld`, :class:`StaleRun`, :class:`WindowClosed`.
        """
        with self._database.write() as db:
            row = _get(db, key)
            if row.holder == run_id:
                return row
            held = db.execute(
                select(_W.c.window, _W.c.holder).where(
                    _W.c.deployment == key.deployment, _W.c.holder.is_not(None)
                )
            ).first()
            if held:
                raise WindowHeld(key, WindowKey(key.deployment, held.window), held.holder)
            if attempt is not None and attempt != row.attempt:
                raise StaleRun(key, run_id, f"it was attempt {attempt}, now is {row.attempt}")
            changes: dict[str, Any] = {"holder": run_id, "run_id": run_id, "seen_at": self._clock()}
            if row.state is State.OWED:
                state = State.RUNNING
            elif row.state in REOPENS and attempt is None:
                state = _stage(db, row) if row.state is State.FAILED else State.RUNNING
                changes["attempt"] = row.attempt + 1
                self._note(db, key, audit.by_run(run_id), Action.REOPENED, f"it was {row.state}, run by hand")
            elif row.state.final:
                raise WindowClosed(key, row.state)
            else:
                state = row.state
            if state is State.RUNNING:
                changes["challenger"] = None
            return self._move(db, row, state, **changes)

    def beat(self, key: WindowKey, run_id: str) -> bool:
        """A sign of life; False when the run does not hold the window any more and must stop."""
        with self._database.write() as db:
            where = _same(key) & (_W.c.holder == run_id)
            return db.execute(update(_W).where(where).values(seen_at=self._clock())).rowcount == 1

    def trained(self, key: WindowKey, run_id: str, *, challenger: str, parent: str, mlflow_run: str) -> None:
        """Its checkpoint is stored. Raises :class:`StaleRun`."""
        with self._database.write() as db:
            row = _held(db, key, run_id, {State.RUNNING})
            self._move(db, row, State.TRAINED, challenger=challenger, parent=parent, mlflow_run=mlflow_run)

    def judged(
        self,
        key: WindowKey,
        run_id: str,
        *,
        champion: str,
        passed: bool,
        evidence: dict[str, Any],
        reason: str,
    ) -> None:
        """Store a verdict on the challenger; without a pass the window is at its end. Raises
        :class:`StaleRun`.
        """
        with self._database.write() as db:
            row = _held(db, key, run_id, {State.TRAINED, State.GATED})
            db.execute(
                insert(tables.verdicts).values(
                    deployment=key.deployment,
                    window=key.window,
                    run_id=run_id,
                    champion=champion,
                    challenger=row.challenger,
                    passed=passed,
                    evidence=evidence,
                    judged_at=self._clock(),
                )
            )
            if passed:
                self._move(db, row, State.GATED, reason=reason)
            else:
                self._reject(db, row, run_id, reason)

    def refused(self, key: WindowKey, run_id: str, reason: str) -> None:
        """Its challenger passed and must not be served: live traffic showed that it is worse. The window is
        at its end. Raises :class:`StaleRun`.
        """
        with self._database.write() as db:
            self._reject(db, _held(db, key, run_id, {State.TRAINED, State.GATED}), run_id, reason)

    def rollout_served(self, rollout: Rollout, evidence: dict[str, Any]) -> None:
        """All servers serve the rollout's draft, and the alias points to it: its window, where it has one, is
        deployed, whoever holds it.
        """
        with self._database.write() as db:
            self.rollouts.served(db, rollout, evidence)
            if rollout.window is not None:
                row = _get(db, WindowKey(rollout.deployment, rollout.window))
                if row.state is not State.DEPLOYED:
                    self._move(db, row, State.DEPLOYED, holder=None)

    # --- the sensor's transitions

    def release(self, seen: WindowRecord, reason: str, max_attempts: int, retry: bool = True) -> WindowRecord:
        """End an attempt that came to nothing: the next one is owed, or the window has failed.

        A stored checkpoint stays: the next attempt goes on from it. ``seen`` is what the decision was made
        on; the window is left alone when it moved since. Returns the record as it is now.
        """
        with self._database.write() as db:
            row = _get(db, seen.key)
            if (row.state, row.attempt, row.holder) != (seen.state, seen.attempt, seen.holder):
                return row
            if not retry or row.attempt >= max_attempts:
                self._note(db, row.key, audit.SENSOR, Action.FAILED, reason, digest=row.challenger)
                return self._move(db, row, State.FAILED, holder=None, reason=reason)
            state = State.OWED if row.state is State.RUNNING else row.state
            return self._move(db, row, state, holder=None, reason=reason, attempt=row.attempt + 1)

    def fold(
        self, seen: Sequence[WindowRecord], into: WindowRecord, state: State, reason: str
    ) -> WindowRecord:
        """End owed windows that ``into``, a later owed one, supersedes, or takes the samples of
        (:attr:`State.MERGED`). Nothing happens where one of them moved since it was read.

        No other window's samples may lie between merged ones. Returns ``into`` as it is now.
        """
        assert state in (State.SUPERSEDED, State.MERGED)
        with self._database.write() as db:
            rows = [_get(db, record.key) for record in (*seen, into)]
            if any(row != record for row, record in zip(rows, (*seen, into), strict=True)):
                return rows[-1]
            action = Action.MERGED if state is State.MERGED else Action.SUPERSEDED
            for row in rows[:-1]:
                assert row.state is State.OWED and row.holder is None
                self._move(db, row, state, reason=reason, taken_by=into.key.window)
                self._note(db, row.key, audit.SENSOR, action, reason, detail={"by": into.key.window})
            if state is State.SUPERSEDED:
                return rows[-1]
            ordered = sorted(rows, key=lambda row: row.after_row)
            assert all(one.last_row <= next.after_row for one, next in itertools.pairwise(ordered))
            return self._move(
                db,
                rows[-1],
                State.OWED,
                after_row=ordered[0].after_row,
                samples=sum(row.samples for row in rows),
                tokens=sum(row.tokens for row in rows),
            )

    # --- who did what

    def audit(self, deployment: str, most: int | None = None) -> list[Entry]:
        """The newest ``most`` entries, or all, oldest first."""
        with self._database.read() as db:
            return audit.entries(db, deployment, most)

    def audit_after(self, deployment: str, row: int, most: int) -> list[tuple[int, Entry]]:
        """The first ``most`` entries behind row number ``row``, oldest first, each with its number."""
        with self._database.read() as db:
            return audit.entries_after(db, deployment, row, most)

    def note(self, entry: Entry) -> None:
        """Adds an entry on what is no transition of a window."""
        with self._database.write() as db:
            audit.write(db, self._clock(), entry)

    def _reject(self, db: Connection, row: WindowRecord, run_id: str, reason: str) -> None:
        self._move(db, row, State.REJECTED, reason=reason, holder=None)
        self._note(db, row.key, audit.by_run(run_id), Action.REJECTED, reason, digest=row.challenger)

    def _note(
        self, db: Connection, key: WindowKey, actor: str, action: Action, reason: str, **more: Any
    ) -> None:
        entry = Entry(key.deployment, actor, action, reason, window=key.window, **more)
        audit.write(db, self._clock(), entry)

    def _move(self, db: Connection, row: WindowRecord, state: State, **changes: Any) -> WindowRecord:
        assert state is row.state or state in FOLLOWS[row.state], f"{row.key}: {row.state} -> {state}"
        same = _same(row.key) & (_W.c.state == row.state.value) & (_W.c.attempt == row.attempt)
        same &= _W.c.holder.is_(None) if row.holder is None else _W.c.holder == row.holder
        values = {"state": state.value, "updated_at": self._clock(), **changes}
        if db.execute(update(_W).where(same).values(**values)).rowcount != 1:
            raise StaleRun(row.key, row.holder or "?", "another process moved it")
        return _get(db, row.key)


@contextmanager
def opened(url: str) -> Iterator[Ledger]:
    """A ledger for a command."""
    ledger = Ledger(url)
    try:
        yield ledger
    finally:
        ledger.close()


def _same(key: WindowKey) -> ColumnElement[bool]:
    return (_W.c.deployment == key.deployment) & (_W.c.window == key.window)


def _get(db: Connection, key: WindowKey) -> WindowRecord:
    row = db.execute(select(_W).where(_same(key))).first()
    if row is None:
        raise UnknownWindow(key)
    return _record(row)


def _record(row: Row[Any]) -> WindowRecord:
    values = dict(row._mapping)
    key = WindowKey(values.pop("deployment"), values.pop("window"))
    return WindowRecord(key=key, state=State(values.pop("state")), **values)


def _held(db: Connection, key: WindowKey, run_id: str, states: set[State]) -> WindowRecord:
    row = _get(db, key)
    if row.holder != run_id or row.state not in states:
        raise StaleRun(
            key, run_id, f"it is {row.state}, attempt {row.attempt}, held by {row.holder or 'no run'}"
        )
    return row


def _stage(db: Connection, row: WindowRecord) -> State:
    """How far a failed window had come."""
    if row.challenger is None:
        return State.RUNNING
    table = tables.verdicts
    where = (table.c.deployment == row.key.deployment, table.c.challenger == row.challenger, table.c.passed)
    return State.GATED if db.execute(select(table.c.id).where(*where)).first() else State.TRAINED


def _scan(db: Connection, deployment: str) -> Scan:
    table = tables.scans
    row = db.execute(select(table).where(table.c.deployment == deployment)).first()
    return Scan(row.version, row.rows, row.last_row, row.pending) if row else Scan()


def _verdict_record(row: Row[Any]) -> VerdictRecord:
    return VerdictRecord(row.passed, row.champion, row.challenger, row.evidence, row.judged_at)
