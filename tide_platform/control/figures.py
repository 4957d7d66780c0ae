"""The ledger in figures: counts and times, added up by the database, for who watches it (`tide metrics`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, select

from tide_platform.control.audit import Action
from tide_platform.control.database import Database
from tide_platform.control.states import OPEN, State
from tide_platform.control.tables import audit, bars, deployments, live_blocks, verdicts, windows

SUMS = ("requests", "aborted", "tokens", "rounds", "accepted", "decode_s", "decoded")  # of live_blocks


@dataclass(frozen=True)
class WindowFigures:
    """``retries``: attempts beyond the first, of all windows; ``attempt``: the highest of the open ones, 0
    where none is open; ``seen_at``: the last sign of life of the run that holds one.
    """

    by_state: Mapping[State, int]
    oldest: Mapping[State, float]  # open states -> Unix time at which their first window was cut
    retries: int
    attempt: int
    seen_at: float | None


@dataclass(frozen=True)
class JudgedFigures:
    """Verdicts by result, and the newest one's evidence."""

    passed: int
    rejected: int
    judged_at: float | None
    evidence: Mapping[str, Any] | None


@dataclass(frozen=True)
class DeployedFigures:
    """``last``: columns of ``tables.deployments``; ``evidence``: of the newest verdict on its draft."""

    count: int
    last: dict[str, Any] | None
    evidence: Mapping[str, Any] | None


@dataclass(frozen=True)
class LiveSum:
    """All finished requests of one draft, tenant and batch size; ``sums``: columns of :data:`SUMS`."""

    draft: str
    tenant: str
    batch: int
    sums: Mapping[str, float]

    @property
    def key(self) -> tuple[str, str, int]:
        return self.draft, self.tenant, self.batch


@dataclass(frozen=True)
class LiveFigures:
    """``left_out``: further draft, tenant and batch sizes that had a request in that time."""

    groups: list[LiveSum] = field(default_factory=list)
    left_out: int = 0


class Figures:
    """Of all deployments, in the ledger's database; each method is one reading transaction."""

    def __init__(self, database: Database):
        self._database = database

    def windows(self, deployment: str) -> WindowFigures:
        own, opened = windows.c.deployment == deployment, [state.value for state in OPEN]
        count, first, more = func.count(), func.min(windows.c.created_at), func.sum(windows.c.attempt - 1)
        with self._database.read() as db:
            query = select(windows.c.state, count, first, more).where(own).group_by(windows.c.state)
            rows = [(State(state), *rest) for state, *rest in db.execute(query)]
            highest = select(func.max(windows.c.attempt)).where(own, windows.c.state.in_(opened))
            attempt = db.execute(highest).scalar()
            held = select(func.max(windows.c.seen_at)).where(own, windows.c.holder.is_not(None))
            seen_at = db.execute(held).scalar()
        return WindowFigures(
            by_state={state: 0 for state in State} | {state: many for state, many, _, _ in rows},
            oldest={state: at for state, _, at, _ in rows if state in OPEN},
            retries=sum(int(extra) for _, _, _, extra in rows),
            attempt=attempt or 0,
            seen_at=seen_at,
        )

    def verdicts(self, deployment: str) -> JudgedFigures:
        own = verdicts.c.deployment == deployment
        with self._database.read() as db:
            counts = _counts(db, verdicts.c.passed, own)
            query = select(verdicts.c.judged_at, verdicts.c.evidence).where(own)
            last = db.execute(query.order_by(verdicts.c.id.desc()).limit(1)).first()
        at, evidence = last if last else (None, None)
        return JudgedFigures(counts.get(True, 0), counts.get(False, 0), at, evidence)

    def deployments(self, deployment: str) -> DeployedFigures:
        own = deployments.c.deployment == deployment
        with self._database.read() as db:
            count = db.execute(select(func.count()).select_from(deployments).where(own)).scalar() or 0
            query = select(deployments).where(own).order_by(deployments.c.id.desc()).limit(1)
            row = db.execute(query).mappings().first()
            if row is None:
                return DeployedFigures(count, None, None)
            of = (verdicts.c.deployment == deployment, verdicts.c.challenger == row["served"])
            newest = select(verdicts.c.evidence).where(*of).order_by(verdicts.c.id.desc()).limit(1)
            return DeployedFigures(count, dict(row), db.execute(newest).scalar())

    def audit(self, deployment: str) -> dict[Action, int]:
        """Entries by action, 0 where there is none."""
        with self._database.read() as db:
            found = _counts(db, audit.c.action, audit.c.deployment == deployment)
        return {action: found.get(action.value, 0) for action in Action}

    def barred(self, deployment: str) -> int:
        """Drafts that are not promoted without a hand."""
        with self._database.read() as db:
            return db.execute(select(func.count()).where(bars.c.deployment == deployment)).scalar() or 0

    def live(self, deployment: str, since: float, most: int) -> LiveFigures:
        """Sums over all time of those drafts, tenants and batch sizes of which a request ended behind
        ``since`` (Unix time): the ``most`` that had one last.
        """
        columns = live_blocks.c
        key = (columns.draft, columns.tenant, columns.batch)
        last = func.max(columns.ended_at)
        query = (
            select(*key, *(func.sum(columns[name]).label(name) for name in SUMS))
            .where(columns.deployment == deployment)
            .group_by(*key)
            .having(last > since)
            .order_by(last.desc(), *key)
        )
        with self._database.read() as db:
            rows = db.execute(query).mappings().all()
        groups = [
            LiveSum(row["draft"], row["tenant"], row["batch"], {name: float(row[name]) for name in SUMS})
            for row in rows[:most]
        ]
        return LiveFigures(groups, len(rows) - len(groups))


def _counts(db: Connection, column: ColumnElement[Any], own: ColumnElement[bool]) -> dict[Any, int]:
    query = select(column, func.count()).where(own).group_by(column)
    return {value: count for value, count in db.execute(query)}
