"""History of live requests; what the controls remember."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "live_blocks",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("deployment", sa.String, nullable=False),
        sa.Column("server", sa.String, nullable=False),
        sa.Column("draft", sa.String, nullable=False),
        sa.Column("tenant", sa.String, nullable=False),
        sa.Column("batch", sa.Integer, nullable=False),
        sa.Column("began_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("requests", sa.Integer, nullable=False),
        sa.Column("aborted", sa.Integer, nullable=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("rounds", sa.BigInteger, nullable=False),
        sa.Column("accepted", sa.BigInteger, nullable=False),
        sa.Column("decode_s", sa.Float, nullable=False),
        sa.Column("decoded", sa.BigInteger, nullable=False),
        sa.Column("token_ms", sa.JSON, nullable=False),
    )
    op.create_index("live_blocks_in_time", "live_blocks", ["deployment", "ended_at"])
    op.create_table(
        "live_steps",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("deployment", sa.String, nullable=False),
        sa.Column("server", sa.String, nullable=False),
        sa.Column("draft", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("batch", sa.Integer, nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
    )
    op.create_index("live_steps_in_time", "live_steps", ["deployment", "at"])
    op.create_table(
        "live_cursors",
        sa.Column("deployment", sa.String, primary_key=True),
        sa.Column("server", sa.String, primary_key=True),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("draft", sa.String, nullable=False),
        sa.Column("rounds_by_batch", sa.JSON, nullable=False),
        sa.Column("missed", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "controls",
        sa.Column("deployment", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.JSON, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
