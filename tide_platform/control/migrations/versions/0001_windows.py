"""Windows, scans, verdicts and deployments: the tables as they were before there were migrations."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "scans",
        sa.Column("deployment", sa.String, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("rows", sa.BigInteger, nullable=False),
        sa.Column("last_row", sa.BigInteger, nullable=False),
        sa.Column("pending", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "windows",
        sa.Column("deployment", sa.String, primary_key=True),
        sa.Column("window", sa.String, primary_key=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("holder", sa.String),
        sa.Column("seen_at", sa.Float),
        sa.Column("run_id", sa.String),
        sa.Column("after_row", sa.BigInteger, nullable=False),
        sa.Column("last_row", sa.BigInteger, nullable=False),
        sa.Column("lance_version", sa.BigInteger, nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("parent", sa.String),
        sa.Column("challenger", sa.String),
        sa.Column("mlflow_run", sa.String),
        sa.Column("reason", sa.String),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
    held = sa.text("holder IS NOT NULL")
    op.create_index(
        "one_window_at_a_time",
        "windows",
        ["deployment"],
        unique=True,
        sqlite_where=held,
        postgresql_where=held,
    )
    op.create_table(
        "verdicts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("deployment", sa.String, nullable=False),
        sa.Column("window", sa.String, nullable=False),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("champion", sa.String, nullable=False),
        sa.Column("challenger", sa.String, nullable=False),
        sa.Column("passed", sa.Boolean, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("judged_at", sa.Float, nullable=False),
    )
    op.create_index("verdict_of_pair", "verdicts", ["deployment", "challenger", "champion"])
    op.create_table(
        "deployments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("deployment", sa.String, nullable=False),
        sa.Column("window", sa.String, nullable=False),
        sa.Column("run_id", sa.String, nullable=False),
        sa.Column("previous", sa.String),
        sa.Column("served", sa.String, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("deployed_at", sa.Float, nullable=False),
    )
