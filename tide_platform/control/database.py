"""The ledger's database: SQLite for one machine, PostgreSQL for a cluster, its tables made by migrations.

Every writing transaction holds one lock from its beginning (SQLite's write lock, an advisory lock of
PostgreSQL's), so what it reads stays true until it commits. They are small and few: a deployment makes some
a minute.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from tide_platform.config import TideError
from tide_platform.control.tables import HEAD, VERSION_TABLE, metadata

_ADVISORY_LOCK = 0x7469646C  # "tidl"; of the database, so ledgers of several deployments share it
_READING = "tide_reading"


class LedgerUnreachable(TideError):
    """The ledger's database does not answer."""

    def __init__(self, url: str, error: Exception):
        super().__init__(
            f"{_shown(url)}: the ledger cannot be read ({type(error).__name__}); check ledger.url"
        )
        self.url = _shown(url)


class LedgerTooNew(TideError):
    """A later version of the project has changed the tables."""

    def __init__(self, url: str, found: str):
        super().__init__(
            f"{_shown(url)}: the ledger is at revision {found}, this version of tide knows {HEAD}; "
            "update tide, or give ledger.url of another ledger"
        )
        self.url, self.found = _shown(url), found


class LedgerLocked(TideError):
    """Another process holds a lock of the ledger's."""

    def __init__(self, name: str, waited_s: float):
        super().__init__(f"{name} was locked for {waited_s:.0f} s by another process; try again after it")
        self.name = name


class Database:
    """Reading and writing transactions. Opening brings the tables to this version's revision.

    Raises :class:`LedgerTooNew`, :class:`LedgerUnreachable`.
    """

    def __init__(self, url: str):
        self.url = url
        self._engine = _engine(url)
        self._reading = self._engine.execution_options(**{_READING: True})
        try:
            self._to_head()
        except SQLAlchemyError as error:
            raise LedgerUnreachable(url, error) from error

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that no other writing one runs beside; committed when the block ends."""
        with self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that waits for nobody."""
        with self._reading.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def lock(self, name: str, wait_s: float) -> Iterator[None]:
        """A lock that goes with this process, between machines that share the database. Nothing on SQLite,
        whose users share a machine and lock a file. Raises :class:`LedgerLocked`.
        """
        if self._engine.dialect.name == "sqlite":
            yield
            return
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        with self._reading.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            end = time.monotonic() + wait_s
            while not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({number})").scalar():
                if time.monotonic() > end:
                    raise LedgerLocked(name, wait_s)
                time.sleep(0.2)
            try:
                yield
            finally:
                connection.exec_driver_sql(f"SELECT pg_advisory_unlock({number})")

    def _to_head(self) -> None:
        with self.read() as connection:
            found = revision(connection)
        if found == HEAD:
            return
        from tide_platform.control.migrations import upgrade

        with self.write() as connection:  # of two processes that open it first, one does the work
            found = revision(connection)
            if found is not None and found > HEAD:
                raise LedgerTooNew(self.url, found)
            if found != HEAD:
                upgrade(connection, found)


def revision(connection: Connection) -> str | None:
    """The revision of the tables; None in an empty database. A ledger from before there were migrations
    is at the first.
    """
    names = set(inspect(connection).get_table_names())
    if VERSION_TABLE in names:
        return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return "0001" if "windows" in names & set(metadata.tables) else None


def _engine(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        engine = create_engine(parsed, pool_pre_ping=True)
        event.listen(engine, "begin", _postgresql_begin)
        return engine
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": 30})
    event.listen(engine, "connect", _sqlite_connect)
    event.listen(engine, "begin", _sqlite_begin)
    return engine


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # a transition that was told of survives a power cut


def _sqlite_begin(connection: Connection) -> None:
    reading = connection.get_execution_options().get(_READING)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _postgresql_begin(connection: Connection) -> None:
    if not connection.get_execution_options().get(_READING):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})")


def _shown(url: str) -> str:
    """Without the password."""
    return make_url(url).render_as_string(hide_password=True)
