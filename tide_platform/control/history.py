"""What live traffic was worth, over time: the servers' finished requests, added up a block at a time.

A server remembers its newest requests only (``/tide/requests``); a sensor asks often enough and keeps sums in
the ledger's database. Each request is counted once, whoever asks and dies: the place up to which a server was
read moves in the transaction that adds its block.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, delete, insert, select

from tide_platform.control import quantiles
from tide_platform.control.database import Database
from tide_platform.control.tables import live_blocks, live_cursors, live_steps
from tide_platform.serving.fleet import Server
from tide_platform.serving.report import acceptance_length

MIXED = ""  # in place of a draft: requests that straddled a reload
DAY_S = 86_400.0


@dataclass(frozen=True)
class Block:
    """Requests that ended in one stretch of time, of one draft, tenant and batch size; columns as in
    ``tables.live_blocks``.
    """

    server: str
    draft: str
    tenant: str
    batch: int
    began_at: float
    ended_at: float
    requests: int
    aborted: int
    tokens: int
    rounds: int
    accepted: int
    decode_s: float
    decoded: int
    token_ms: dict[str, int]

    @property
    def acceptance_length(self) -> float | None:
        """None of requests without a verify round."""
        return acceptance_length(self.rounds, self.accepted)

    @property
    def mean_token_ms(self) -> float | None:
        """Milliseconds a token behind a request's first, every token weighing alike."""
        return self.decode_s * 1000 / self.decoded if self.decoded else None

    def quantile_ms(self, share: float) -> float | None:
        """Of the requests' times a token, to 2.5 %."""
        return quantiles.quantile(self.token_ms, share)


@dataclass(frozen=True)
class Steps:
    """Decode steps of one server with ``batch`` requests in them, up to ``at``."""

    server: str
    draft: str
    at: float
    batch: int
    steps: int


@dataclass(frozen=True)
class Cursor:
    """How far a server was read. ``started_at``: in which of its lives; ``missed``: requests that it forgot
    before they were asked for.
    """

    started_at: float = 0.0
    number: int = 0
    draft: str = ""
    rounds_by_batch: dict[str, int] = field(default_factory=dict)
    missed: int = 0


class History:
    """Of all deployments, in the ledger's database. ``clock``: Unix time, seconds."""

    def __init__(self, database: Database, clock: Callable[[], float]):
        self._database, self._clock = database, clock

    def cursor(self, deployment: str, server: str) -> Cursor:
        with self._database.read() as db:
            return _cursor(db, deployment, server)

    def missed(self, deployment: str) -> int:
        """Requests that servers forgot before they were asked: more than 4,096 between two looks."""
        where = live_cursors.c.deployment == deployment
        with self._database.read() as db:
            return sum(db.execute(select(live_cursors.c.missed).where(where)).scalars())

    def record(self, deployment: str, server: str, told: Mapping[str, Any]) -> list[Block]:
        """Adds what a server told (``/tide/requests``) behind its cursor; the new blocks.

        An answer to an older question, or one that was added already, adds nothing twice.
        """
        with self._database.write() as db:
            before = _cursor(db, deployment, server)
            restarted = told["started_at"] != before.started_at
            if told["started_at"] < before.started_at:
                return []  # an answer from a life before
            number = 0 if restarted else before.number
            requests = [one for one in told["requests"] if one["number"] > number]
            blocks = blocks_of(server, requests)
            if blocks:
                db.execute(insert(live_blocks), [{"deployment": deployment, **asdict(b)} for b in blocks])
            steps = _grown(told, before, restarted)
            if steps:
                here = {
                    "deployment": deployment,
                    "server": server,
                    "draft": told["draft"],
                    "at": self._clock(),
                }
                db.execute(
                    insert(live_steps), [{**here, "batch": size, "steps": n} for size, n in steps.items()]
                )
            after = Cursor(
                told["started_at"],
                max((one["number"] for one in requests), default=number),
                told["draft"],
                dict(told["rounds_by_batch"]),
                before.missed + (told["missed"] if requests else 0),
            )
            if after != before:
                where = (live_cursors.c.deployment == deployment, live_cursors.c.server == server)
                db.execute(delete(live_cursors).where(*where))
                db.execute(insert(live_cursors).values(deployment=deployment, server=server, **asdict(after)))
        return blocks

    def blocks(self, deployment: str, since: float = 0.0, until: float | None = None) -> list[Block]:
        """Blocks whose last request ended behind ``since`` (Unix time), oldest first."""
        table = live_blocks
        query = select(table).where(table.c.deployment == deployment, table.c.ended_at > since)
        if until is not None:
            query = query.where(table.c.ended_at <= until)
        with self._database.read() as db:
            rows = db.execute(query.order_by(table.c.ended_at, table.c.id)).mappings()
            return [_block(row) for row in rows]

    def steps(self, deployment: str, since: float = 0.0) -> list[Steps]:
        """Decode steps that were read behind ``since``, oldest first."""
        table = live_steps
        query = select(table).where(table.c.deployment == deployment, table.c.at > since)
        with self._database.read() as db:
            rows = db.execute(query.order_by(table.c.at, table.c.id)).mappings()
            return [Steps(**{k: v for k, v in row.items() if k not in ("id", "deployment")}) for row in rows]

    def thin(self, deployment: str, older_than_s: float = DAY_S, into_s: float = 3600.0) -> int:
        """Blocks and steps older than ``older_than_s`` become one for each ``into_s`` seconds; how many rows
        that saved. Sums and quantiles stay what they were.
        """
        before = self._clock() - older_than_s
        before -= before % into_s
        saved = 0
        with self._database.write() as db:
            old = (live_blocks.c.deployment == deployment, live_blocks.c.ended_at <= before)
            kept = [_block(row) for row in db.execute(select(live_blocks).where(*old)).mappings()]
            slots: dict[Any, list[Block]] = defaultdict(list)
            for b in kept:
                slots[b.server, b.draft, b.tenant, b.batch, b.ended_at // into_s].append(b)
            if len(slots) < len(kept):
                db.execute(delete(live_blocks).where(*old))
                joined = [asdict(total(blocks)) for blocks in slots.values()]
                db.execute(insert(live_blocks), [{"deployment": deployment, **row} for row in joined])
                saved += len(kept) - len(slots)
            saved += self._thin_steps(db, deployment, before, into_s)
        return saved

    def _thin_steps(self, db: Connection, deployment: str, before: float, into_s: float) -> int:
        table = live_steps
        old = (table.c.deployment == deployment, table.c.at <= before)
        rows = [dict(row) for row in db.execute(select(table).where(*old)).mappings()]
        sums: dict[Any, dict[str, Any]] = {}
        for row in rows:
            row.pop("id")
            slot = (row["server"], row["draft"], row["batch"], row["at"] // into_s)
            if slot in sums:
                row["steps"] += sums[slot]["steps"]
                row["at"] = max(row["at"], sums[slot]["at"])
            sums[slot] = row
        if len(sums) == len(rows):
            return 0
        db.execute(delete(table).where(*old))
        db.execute(insert(table), list(sums.values()))
        return len(rows) - len(sums)


def observe(history: History, deployment: str, server: Server) -> list[Mapping[str, Any]]:
    """Reads all that a server has finished since the last look; those requests. Raises
    :class:`ServerUnreachable`, :class:`ServerRefused`.
    """
    found: list[Mapping[str, Any]] = []
    while True:
        cursor = history.cursor(deployment, server.base_url)
        told = server.requests(cursor.number)
        if told["started_at"] != cursor.started_at and cursor.number:
            told = server.requests(0)
        history.record(deployment, server.base_url, told)
        found += told["requests"]
        if not told["requests"] or told["requests"][-1]["number"] >= told["last"]:
            return found


def blocks_of(server: str, requests: Iterable[Mapping[str, Any]]) -> list[Block]:
    """Finished requests added up, by draft, tenant and batch size."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for one in requests:
        draft = MIXED if one["straddles"] else one["draft"]
        groups[draft, one["tenant"], batch_of(one["concurrency"])].append(one)
    return [_sum(server, *key, of) for key, of in groups.items()]


def batch_of(concurrency: float | None) -> int:
    """The power of two that a mean number of requests at a time does not exceed; 1 where it is not known."""
    size = 1
    while concurrency is not None and size < concurrency - 1e-9:
        size *= 2
    return size


def total(blocks: Sequence[Block]) -> Block:
    """All of them as one, under the names of the first. Raises ``ValueError`` of nothing."""
    if not blocks:
        raise ValueError("no block to add up")
    sums = {
        name: sum(getattr(b, name) for b in blocks)
        for name in ("requests", "aborted", "tokens", "rounds", "accepted", "decode_s", "decoded")
    }
    return replace(
        blocks[0],
        began_at=min(b.began_at for b in blocks),
        ended_at=max(b.ended_at for b in blocks),
        token_ms=quantiles.merged(b.token_ms for b in blocks),
        **sums,
    )


def histogram(steps: Iterable[Steps]) -> dict[int, int]:
    """Decode steps by batch size."""
    counts: dict[int, int] = defaultdict(int)
    for one in steps:
        counts[one.batch] += one.steps
    return dict(sorted(counts.items()))


def _sum(server: str, draft: str, tenant: str, batch: int, of: list[Mapping[str, Any]]) -> Block:
    timed = [one for one in of if one["token_ms"]]
    return Block(
        server=server,
        draft=draft,
        tenant=tenant,
        batch=batch,
        began_at=min(one["at"] for one in of),
        ended_at=max(one["at"] for one in of),
        requests=len(of),
        aborted=sum(one["reason"] == "abort" for one in of),
        tokens=sum(one["tokens"] for one in of),
        rounds=sum(one["rounds"] for one in of),
        accepted=sum(one["accepted"] for one in of),
        decode_s=sum(one["token_ms"] * (one["tokens"] - 1) / 1000 for one in timed),
        decoded=sum(one["tokens"] - 1 for one in timed),
        token_ms=quantiles.sketch(one["token_ms"] for one in timed),
    )


def _grown(told: Mapping[str, Any], before: Cursor, restarted: bool) -> dict[int, int]:
    """Steps since the last look: a server counts anew with each draft and each start."""
    known = before.rounds_by_batch
    if restarted or told["draft"] != before.draft:
        known = {}
    found = {int(size): steps - known.get(size, 0) for size, steps in told["rounds_by_batch"].items()}
    return {size: steps for size, steps in found.items() if steps > 0}


def _cursor(db: Connection, deployment: str, server: str) -> Cursor:
    where = (live_cursors.c.deployment == deployment, live_cursors.c.server == server)
    row = db.execute(select(live_cursors).where(*where)).mappings().first()
    if row is None:
        return Cursor()
    return Cursor(**{key: value for key, value in row.items() if key not in ("deployment", "server")})


def _block(row: Mapping[Any, Any]) -> Block:
    return Block(**{key: value for key, value in row.items() if key not in ("id", "deployment")})
