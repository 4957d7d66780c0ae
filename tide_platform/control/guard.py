"""What a hand, or a rollback, forbids the platform to do: a frozen deployment, barred drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, delete, insert, select

from tide_platform.config import TideError
from tide_platform.control.audit import Action, Entry, write
from tide_platform.control.database import Database
from tide_platform.control.tables import bars, switches

_FREEZE = "freeze"


@dataclass(frozen=True)
class Held:
    """Who forbade it, when (Unix time, seconds), and why."""

    actor: str
    reason: str
    at: float


class Frozen(TideError):
    """Nothing is deployed by itself."""

    def __init__(self, deployment: str, by: Held):
        super().__init__(
            f"{deployment} was frozen by {by.actor}: {by.reason}; `tide freeze --off` lets it go on"
        )
        self.deployment, self.by = deployment, by


class Barred(TideError):
    """The draft was rolled back, or barred by hand."""

    def __init__(self, deployment: str, digest: str, by: Held):
        super().__init__(
            f"{deployment}: draft {digest} was barred by {by.actor}: {by.reason}; "
            f"`tide promote {digest} --unbar` lets it be served again"
        )
        self.deployment, self.digest, self.by = deployment, digest, by


class Guard:
    """Freezes and bars of all deployments, in the ledger's database. Each change is audited."""

    def __init__(self, database: Database, clock: Callable[[], float]):
        self._database, self._clock = database, clock

    def freeze(self, deployment: str, actor: str, reason: str) -> None:
        """Until it is thawed nothing is promoted by the platform; windows are trained and judged."""
        now = self._clock()
        with self._database.write() as db:
            _remove(db, deployment)
            db.execute(
                insert(switches).values(
                    deployment=deployment, name=_FREEZE, actor=actor, reason=reason, at=now
                )
            )
            write(db, now, Entry(deployment, actor, Action.FROZEN, reason))

    def thaw(self, deployment: str, actor: str, reason: str) -> bool:
        """False where it was not frozen."""
        with self._database.write() as db:
            if not _remove(db, deployment):
                return False
            write(db, self._clock(), Entry(deployment, actor, Action.THAWED, reason))
            return True

    def frozen(self, deployment: str) -> Held | None:
        where = (switches.c.deployment == deployment, switches.c.name == _FREEZE)
        with self._database.read() as db:
            return _held(db, select(*switches.c["actor", "reason", "at"]).where(*where))

    def bar(self, deployment: str, digest: str, actor: str, reason: str) -> None:
        """The draft is not promoted again without a hand."""
        now = self._clock()
        with self._database.write() as db:
            db.execute(delete(bars).where(bars.c.deployment == deployment, bars.c.digest == digest))
            db.execute(
                insert(bars).values(deployment=deployment, digest=digest, actor=actor, reason=reason, at=now)
            )
            write(db, now, Entry(deployment, actor, Action.BARRED, reason, digest=digest))

    def unbar(self, deployment: str, digest: str, actor: str, reason: str) -> bool:
        """False where it was not barred."""
        with self._database.write() as db:
            where = (bars.c.deployment == deployment, bars.c.digest == digest)
            if not db.execute(delete(bars).where(*where)).rowcount:
                return False
            write(db, self._clock(), Entry(deployment, actor, Action.UNBARRED, reason, digest=digest))
            return True

    def barred(self, deployment: str, digest: str) -> Held | None:
        where = (bars.c.deployment == deployment, bars.c.digest == digest)
        with self._database.read() as db:
            return _held(db, select(*bars.c["actor", "reason", "at"]).where(*where))

    def barred_drafts(self, deployment: str) -> dict[str, Held]:
        """All barred drafts by digest, oldest bar first."""
        query = select(*bars.c["digest", "actor", "reason", "at"]).where(bars.c.deployment == deployment)
        with self._database.read() as db:
            return {
                row.digest: Held(row.actor, row.reason, row.at)
                for row in db.execute(query.order_by(bars.c.at))
            }

    def check(self, deployment: str, digest: str) -> None:
        """Raises :class:`Frozen`, :class:`Barred`: may the platform promote this draft by itself?"""
        if (held := self.frozen(deployment)) is not None:
            raise Frozen(deployment, held)
        if (held := self.barred(deployment, digest)) is not None:
            raise Barred(deployment, digest, held)


def _remove(db: Connection, deployment: str) -> int:
    where = (switches.c.deployment == deployment, switches.c.name == _FREEZE)
    return db.execute(delete(switches).where(*where)).rowcount


def _held(db: Connection, query: Select[Any]) -> Held | None:
    row = db.execute(query).first()
    return Held(*row) if row else None
