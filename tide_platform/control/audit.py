"""Who did what to which draft or window, and why. The table is only ever added to; each entry is written in
the transaction of the change that it tells of.
"""

import getpass
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, insert, select

from tide_platform.control.tables import audit

SENSOR = "sensor"  # the actor of what the platform does by itself


class Action(StrEnum):
    """What is audited."""

    DEPLOYED = "deployed"  # a window's challenger is served
    PROMOTED = "promoted"  # by hand
    ROLLED_BACK = "rolled back"
    REJECTED = "rejected"  # by the gate
    FAILED = "failed"
    SUPERSEDED = "superseded"
    MERGED = "merged"
    REOPENED = "reopened"  # a window that was at its end, by hand
    FROZEN = "frozen"
    THAWED = "thawed"
    BARRED = "barred"
    UNBARRED = "unbarred"
    DRIFTED = "drifted"  # live acceptance fell
    CAPTURE_ON = "capture on"
    CAPTURE_OFF = "capture off"
    MENDED = "mended"  # a server that served another draft than the champion
    SLOWER = "slower"  # speculation than none, at a batch size
    FASTER = "faster"  # ... again
    CLEARED = "cleared"  # a champion that was suspected to be worse than the draft before it


@dataclass(frozen=True)
class Entry:
    """One row. ``window`` and ``digest`` (of a draft) where it is about one."""

    deployment: str
    actor: str
    action: Action
    reason: str
    window: str | None = None
    digest: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0  # Unix time, seconds; set when it is written


def by_hand() -> str:
    """The actor of a command that a person gave."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def by_run(run_id: str) -> str:
    """The actor of a step of a Dagster run."""
    return f"run {run_id}"


def write(db: Connection, at: float, entry: Entry) -> None:
    """Adds an entry, in the caller's transaction."""
    db.execute(insert(audit).values(vars(entry) | {"action": entry.action.value, "at": at}))


def entries(db: Connection, deployment: str, most: int | None = None) -> list[Entry]:
    """The newest ``most``, or all, oldest first."""
    columns = [column for column in audit.c if column.name != "id"]
    query = select(*columns).where(audit.c.deployment == deployment).order_by(audit.c.id.desc())
    found = []
    for row in db.execute(query.limit(most) if most else query).mappings():
        values: dict[str, Any] = dict(row)
        found.append(Entry(action=Action(values.pop("action")), **values))
    return found[::-1]


def entries_after(db: Connection, deployment: str, row: int, most: int) -> list[tuple[int, Entry]]:
    """The first ``most`` behind row number ``row``, oldest first, each with its number."""
    query = select(audit).where(audit.c.deployment == deployment, audit.c.id > row).order_by(audit.c.id)
    found = []
    for each in db.execute(query.limit(most)).mappings():
        values: dict[str, Any] = dict(each)
        number = values.pop("id")
        found.append((number, Entry(action=Action(values.pop("action")), **values)))
    return found
