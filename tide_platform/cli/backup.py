"""``tide backup``: a deployment's memory in a folder."""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Ledger, champion, the draft before it, and MLflow's database where it is a file."""
    from tide_platform.control.backup import back_up

    made = back_up(load_settings(config), folder)
    typer.echo(
        f"{folder}: {sum(made.rows.values())} rows of the ledger, drafts {', '.join(made.drafts) or 'none'}"
    )
    if not made.mlflow:
        typer.echo("MLflow's database is no file here: back it up with its own tools", err=True)
