"""The ledger's tables. A change here needs a migration (`control/migrations`) and a new ``HEAD``; a test
compares the two on both databases.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
)

HEAD = "0004"  # revision of these tables
VERSION_TABLE = "alembic_version"

metadata = MetaData()

scans = Table(
    "scans",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("version", BigInteger, nullable=False),  # of the dataset when its rows were last read
    Column("rows", BigInteger, nullable=False),  # of the dataset then
    # row id up to which every sample is in a window or reference
    Column("last_row", BigInteger, nullable=False),
    Column("pending", BigInteger, nullable=False),  # samples behind it that wait for a window
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
    Column("after_row", BigInteger, nullable=False),  # its samples: after_row < row id <= last_row
    Column("last_row", BigInteger, nullable=False),
    Column("lance_version", BigInteger, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("parent", String),  # digest of the draft that training started from
    Column("challenger", String),  # digest of its checkpoint
    Column("mlflow_run", String),
    Column("reason", String),  # why the last attempt ended, or the verdict in words
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("rule", JSON),  # why it was cut: the rule, what it saw; None where an older version cut it
    Column("taken_by", String),  # the window that superseded it or that it was merged into
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
    Column("window", String),  # none where a hand, or a rollback, served another draft
    Column("run_id", String),
    Column("previous", String),  # the draft served before; none known where a dead run had reloaded already
    Column("served", String, nullable=False),
    Column("evidence", JSON, nullable=False),
    Column("deployed_at", Float, nullable=False),
)

# a draft on its way to the servers; one that is unfinished is finished or undone before another begins
rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("deployment", String, nullable=False),
    Column("window", String),
    Column("run_id", String),
    Column("actor", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("challenger", String, nullable=False),
    Column("previous", String, nullable=False),  # the draft that all servers served
    Column("servers", JSON, nullable=False),  # base URLs, the canary first
    Column("step", String, nullable=False),  # control.states.Step
    Column("evidence", JSON, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
)
Index(
    "one_rollout_at_a_time",
    rollouts.c.deployment,
    unique=True,
    sqlite_where=rollouts.c.step.not_in(["served", "undone"]),
    postgresql_where=rollouts.c.step.not_in(["served", "undone"]),
)

# who did what to which draft or window, and why; rows are only ever added (triggers refuse all else)
audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Float, nullable=False),  # Unix time, seconds
    Column("deployment", String, nullable=False),
    Column("actor", String, nullable=False),  # user@host, `sensor`, or `run <id>`
    Column("action", String, nullable=False),  # control.states.Action
    Column("window", String),
    Column("digest", String),  # of the draft
    Column("reason", String, nullable=False),
    Column("detail", JSON, nullable=False),
)
Index("audit_of_deployment", audit.c.deployment, audit.c.id)

# drafts that are never promoted without a hand: they were rolled back
bars = Table(
    "bars",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("digest", String, primary_key=True),
    Column("actor", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("at", Float, nullable=False),
)

# what a hand or the platform has switched: absent is off
switches = Table(
    "switches",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("actor", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("at", Float, nullable=False),
)

# what the servers' finished requests were worth, a row for each time they were asked (control.history)
live_blocks = Table(
    "live_blocks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("deployment", String, nullable=False),
    Column("server", String, nullable=False),  # base URL
    Column("draft", String, nullable=False),  # digest; empty: requests that straddled a reload
    Column("tenant", String, nullable=False),
    Column("batch", Integer, nullable=False),  # requests at a time: up to 1, 2, 4, 8, ...
    Column("began_at", Float, nullable=False),  # Unix time, seconds: the first of them ended
    Column("ended_at", Float, nullable=False),  # ... and the last
    Column("requests", Integer, nullable=False),
    Column("aborted", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),  # of responses
    Column("rounds", BigInteger, nullable=False),  # verify rounds
    Column("accepted", BigInteger, nullable=False),  # draft tokens accepted in them
    Column("decode_s", Float, nullable=False),  # seconds of decoding, summed over the requests
    Column("decoded", BigInteger, nullable=False),  # tokens behind the first, in these seconds
    Column("token_ms", JSON, nullable=False),  # requests by their time a token (control.quantiles)
)
Index("live_blocks_in_time", live_blocks.c.deployment, live_blocks.c.ended_at)

# decode steps by the number of requests in them, since the time before
live_steps = Table(
    "live_steps",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("deployment", String, nullable=False),
    Column("server", String, nullable=False),
    Column("draft", String, nullable=False),
    Column("at", Float, nullable=False),  # Unix time, seconds
    Column("batch", Integer, nullable=False),
    Column("steps", BigInteger, nullable=False),
)
Index("live_steps_in_time", live_steps.c.deployment, live_steps.c.at)

# how far each server's finished requests were read
live_cursors = Table(
    "live_cursors",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("server", String, primary_key=True),
    Column("started_at", Float, nullable=False),  # Unix time, seconds: the server's life that is told of
    Column("number", BigInteger, nullable=False),  # of the last request
    Column("draft", String, nullable=False),  # that the counts below are of
    Column("rounds_by_batch", JSON, nullable=False),
    Column("missed", BigInteger, nullable=False),  # requests that a server forgot before it was asked
)

# what the platform's own controls remember between two looks
controls = Table(
    "controls",
    metadata,
    Column("deployment", String, primary_key=True),
    Column("name", String, primary_key=True),
    Column("value", JSON, nullable=False),
    Column("at", Float, nullable=False),
)
