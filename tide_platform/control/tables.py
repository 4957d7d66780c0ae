"""The ledger's tables, and the engine that SQLite needs to be safe between processes."""

from pathlib import Path
from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    make_url,
)

metadata = MetaData()

scans = Table(
    "scans",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("version", Integer, nullable=False),  # of the dataset when its rows were last read
    Column("rows", Integer, nullable=False),  # of the dataset then
    Column(
        "last_row", Integer, nullable=False
    ),  # row id up to which every sample is in a window or reference
    Column("pending", Integer, nullable=False),  # samples behind it that wait for a window
)

windows = Table(
    "windows",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("window", String, primary_key=True),
    Column("state", String, nullable=False),
    Column("attempt", Integer, nullable=False),  # from 1
    Column("holder", String),  # Dagster run that works on it now
    Column("seen_at", Float),  # Unix time, seconds: the holder's last sign of life
    Column("run_id", String),  # the last Dagster run that held it
    Column("after_row", Integer, nullable=False),  # its samples: after_row < row id <= last_row
    Column("last_row", Integer, nullable=False),
    Column("lance_version", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("parent", String),  # digest of the draft that training started from
    Column("challenger", String),  # digest of its checkpoint
    Column("mlflow_run", String),
    Column("reason", String),  # why the last attempt ended, or the verdict in words
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)
# design 4.6: at most one window of a deployment runs
Index(
    "one_window_at_a_time",
    windows.c.deployment,
    unique=True,
    sqlite_where=windows.c.holder.is_not(None),
    postgresql_where=windows.c.holder.is_not(None),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("deployment", String, nullable=False),
    Column("window", String, nullable=False),
    Column("run_id", String, nullable=False),
    Column("champion", String, nullable=False),
    Column("challenger", String, nullable=False),
    Column("passed", Boolean, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("judged_at", Float, nullable=False),
)
Index("verdict_of_pair", verdicts.c.deployment, verdicts.c.challenger, verdicts.c.champion)

deployments = Table(
    "deployments",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("deployment", String, nullable=False),
    Column("window", String, nullable=False),
    Column("run_id", String, nullable=False),
    Column("previous", String),  # the draft served before; none known where a dead run had reloaded already
    Column("served", String, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("deployed_at", Float, nullable=False),
)


def open_engine(url: str) -> Engine:
    """An engine with the tables made. SQLite: WAL, and every transaction takes the write lock at its start.

    The lock at the start is what makes read-then-update safe there: two processes never both read the old
    row.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        engine = create_engine(parsed, pool_pre_ping=True)
    else:
        if parsed.database and parsed.database != ":memory:":
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(parsed, connect_args={"timeout": 30})
        event.listen(engine, "connect", _sqlite_connect)
        event.listen(engine, "begin", _sqlite_begin)
    metadata.create_all(engine)
    return engine


def _sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")  # a transition that was told of survives a power cut


def _sqlite_begin(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
