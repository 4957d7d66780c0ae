"""Rollouts; deployments by hand, which have no window."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("deployments") as table:
        table.alter_column("window", existing_type=sa.String, nullable=True)
        table.alter_column("run_id", existing_type=sa.String, nullable=True)
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("deployment", sa.String, nullable=False),
        sa.Column("window", sa.String),
        sa.Column("run_id", sa.String),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("challenger", sa.String, nullable=False),
        sa.Column("previous", sa.String, nullable=False),
        sa.Column("servers", sa.JSON, nullable=False),
        sa.Column("step", sa.String, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
    unfinished = sa.text("step NOT IN ('served', 'undone')")
    op.create_index(
        "one_rollout_at_a_time",
        "rollouts",
        ["deployment"],
        unique=True,
        sqlite_where=unfinished,
        postgresql_where=unfinished,
    )
