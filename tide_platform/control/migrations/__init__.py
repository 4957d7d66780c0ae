"""The ledger's migrations (alembic), applied when a ledger is opened: see :class:`Database`."""

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from tide_platform.control.tables import HEAD, VERSION_TABLE

if TYPE_CHECKING:
    from alembic.config import Config


def config() -> "Config":
    """Of the migrations in this folder; no file is read."""
    from alembic.config import Config

    found = Config()
    found.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    found.set_main_option("version_table", VERSION_TABLE)
    return found


def upgrade(connection: Connection, found: str | None, to: str = HEAD) -> None:
    """Brings the tables from revision ``found`` (None: an empty database) to ``to``, in the caller's
    transaction.
    """
    from alembic import command

    given = config()
    given.attributes["connection"] = connection
    if found == "0001":  # from before there were migrations, perhaps: then nothing says so in the database
        command.stamp(given, found)
    command.upgrade(given, to)
