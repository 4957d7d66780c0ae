"""Rollouts in the ledger: a draft on its way to the servers, step by step, so that a dead one can be finished
or undone by whoever comes next.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, insert, select, update

from tide_platform.config import TideError
from tide_platform.control import tables
from tide_platform.control.audit import Action, Entry, write
from tide_platform.control.database import Database

_R = tables.rollouts


class Step(StrEnum):
    """How far a rollout has come. All but the last two are unfinished."""

    CANARY = "canary"  # one server takes it
    WATCHED = "watched"  # and is watched
    WAVES = "waves"  # the others take it
    PROMOTING = "promoting"  # all serve it: pointer, alias and ledger follow
    SERVED = "served"
    UNDONE = "undone"


DONE = frozenset({Step.SERVED, Step.UNDONE})


class RolloutUnfinished(TideError):
    """Another draft is on its way to the servers."""

    def __init__(self, deployment: str, challenger: str, step: Step):
        super().__init__(
            f"{deployment}: the rollout of draft {challenger} is unfinished ({step}); the next one finishes "
            "or undoes it"
        )
        self.deployment, self.challenger, self.step = deployment, challenger, step


@dataclass(frozen=True)
class Order:
    """What is to be served, who wants it and why. ``action``: what the audit calls it when it is done."""

    challenger: str
    actor: str
    reason: str
    action: Action = Action.DEPLOYED
    window: str | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class Rollout:
    """One row; fields as in ``tables.rollouts``."""

    id: int
    deployment: str
    window: str | None
    run_id: str | None
    actor: str
    reason: str
    challenger: str
    previous: str
    servers: list[str]
    step: Step
    evidence: dict[str, Any] = field(default_factory=dict)
    started_at: float = 0.0
    updated_at: float = 0.0


class Rollouts:
    """Of all deployments, in the ledger's database. Changed under the deployment's lock only."""

    def __init__(self, database: Database, clock: Callable[[], float]):
        self._database, self._clock = database, clock

    def unfinished(self, deployment: str) -> Rollout | None:
        where = (_R.c.deployment == deployment, _R.c.step.not_in([step.value for step in DONE]))
        with self._database.read() as db:
            row = db.execute(select(_R).where(*where)).mappings().first()
        return _rollout(row) if row else None

    def history(self, deployment: str) -> list[Rollout]:
        """Oldest first."""
        with self._database.read() as db:
            rows = db.execute(select(_R).where(_R.c.deployment == deployment).order_by(_R.c.id)).mappings()
            return [_rollout(row) for row in rows]

    def begin(self, deployment: str, order: Order, previous: str, servers: Sequence[str]) -> Rollout:
        """Raises :class:`RolloutUnfinished`."""
        other = self.unfinished(deployment)
        if other is not None:
            raise RolloutUnfinished(deployment, other.challenger, other.step)
        now = self._clock()
        values = asdict(order)
        values.pop("action")
        values |= {
            "deployment": deployment,
            "previous": previous,
            "servers": list(servers),
            "step": Step.CANARY.value,
            "evidence": {"action": order.action.value},
            "started_at": now,
            "updated_at": now,
        }
        with self._database.write() as db:
            db.execute(insert(_R).values(values))
        rollout = self.unfinished(deployment)
        assert rollout is not None
        return rollout

    def reached(self, rollout: Rollout, step: Step, **evidence: Any) -> Rollout:
        """An unfinished rollout has come to ``step``; ``evidence`` is added to what is known."""
        assert step not in DONE
        with self._database.write() as db:
            return self._move(db, rollout, step, evidence)

    def undone(self, rollout: Rollout, reason: str, **evidence: Any) -> Rollout:
        """All servers serve the previous draft again."""
        with self._database.write() as db:
            done = self._move(db, rollout, Step.UNDONE, {"undone": reason, **evidence})
            entry = Entry(
                rollout.deployment,
                rollout.actor,
                Action.ROLLED_BACK,
                reason,
                window=rollout.window,
                digest=rollout.challenger,
                detail={"serves": rollout.previous},
            )
            write(db, self._clock(), entry)
        return done

    def served(self, db: Connection, rollout: Rollout, evidence: dict[str, Any]) -> None:
        """All is done: the deployment's history and the audit say so, in the caller's transaction."""
        now = self._clock()
        self._move(db, rollout, Step.SERVED, evidence)
        db.execute(
            insert(tables.deployments).values(
                deployment=rollout.deployment,
                window=rollout.window,
                run_id=rollout.run_id,
                previous=rollout.previous,
                served=rollout.challenger,
                evidence=evidence,
                deployed_at=now,
            )
        )
        entry = Entry(
            rollout.deployment,
            rollout.actor,
            Action(rollout.evidence["action"]),
            rollout.reason,
            window=rollout.window,
            digest=rollout.challenger,
            detail={"in place of": rollout.previous} | evidence,
        )
        write(db, now, entry)

    def _move(self, db: Connection, rollout: Rollout, step: Step, evidence: dict[str, Any]) -> Rollout:
        changes = {
            "step": step.value,
            "evidence": rollout.evidence | evidence,
            "updated_at": self._clock(),
        }
        db.execute(update(_R).where(_R.c.id == rollout.id).values(changes))
        return _rollout(db.execute(select(_R).where(_R.c.id == rollout.id)).mappings().one())


def _rollout(row: Any) -> Rollout:
    values: dict[str, Any] = dict(row)
    return Rollout(step=Step(values.pop("step")), **values)
