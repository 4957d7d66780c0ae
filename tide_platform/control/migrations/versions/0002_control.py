"""Why a window was cut and what took it; the audit, barred drafts, switches."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_REFUSED = "the audit is only ever added to"


def upgrade() -> None:
    op.add_column("windows", sa.Column("rule", sa.JSON))
    op.add_column("windows", sa.Column("taken_by", sa.String))
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("deployment", sa.String, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("window", sa.String),
        sa.Column("digest", sa.String),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
    )
    op.create_index("audit_of_deployment", "audit", ["deployment", "id"])
    op.create_table(
        "bars",
        sa.Column("deployment", sa.String, primary_key=True),
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    op.create_table(
        "switches",
        sa.Column("deployment", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("at", sa.Float, nullable=False),
    )
    _append_only()


def _append_only() -> None:
    if op.get_context().dialect.name == "sqlite":
        for event in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{event.lower()} BEFORE {event} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION tide_audit_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_REFUSED}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION tide_audit_append_only()"
    )
