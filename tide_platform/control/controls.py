"""What the platform's own controls remember between two looks, in the ledger's database."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select

from tide_platform.control.database import Database
from tide_platform.control.tables import controls


class Controls:
    """A JSON object for each deployment and name."""

    def __init__(self, database: Database, clock: Callable[[], float]):
        self._database, self._clock = database, clock

    def get(self, deployment: str, name: str) -> dict[str, Any]:
        """Empty where nothing was put yet."""
        with self._database.read() as db:
            return _get(db, deployment, name)

    def put(self, deployment: str, name: str, value: dict[str, Any]) -> None:
        """In place of what was there."""
        with self._database.write() as db:
            self._put(db, deployment, name, value)

    def add(self, deployment: str, name: str, counts: dict[str, int]) -> dict[str, int]:
        """Adds to counters; what they are then."""
        with self._database.write() as db:
            known = _get(db, deployment, name)
            sums = known | {key: known.get(key, 0) + count for key, count in counts.items()}
            self._put(db, deployment, name, sums)
        return sums

    def _put(self, db: Connection, deployment: str, name: str, value: dict[str, Any]) -> None:
        db.execute(delete(controls).where(*_at(deployment, name)))
        db.execute(insert(controls).values(deployment=deployment, name=name, value=value, at=self._clock()))


def _get(db: Connection, deployment: str, name: str) -> dict[str, Any]:
    return db.execute(select(controls.c.value).where(*_at(deployment, name))).scalar() or {}


def _at(deployment: str, name: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return controls.c.deployment == deployment, controls.c.name == name
