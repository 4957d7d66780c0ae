"""``tide restore``: what ``tide backup`` wrote, brought back."""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    folder: Annotated[Path, typer.Argument(help="what `tide backup` wrote")],
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Into an empty ledger (SQLite or PostgreSQL, whichever it came from); nothing is written over."""
    from tide_platform.control.backup import restore

    made = restore(load_settings(config), folder)
    typer.echo(
        f"{made.deployment}: champion {made.champion or 'none'}, {sum(made.rows.values())} rows are back"
    )
