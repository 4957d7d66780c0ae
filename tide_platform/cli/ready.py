"""``tide ready``: for the probe that decides whether a server gets traffic."""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Whether the server of this machine may take traffic: it answers, captures, and serves the champion.

    Exit status 1: not yet; the reasons are printed.
    """
    from tide_platform.control.champion import allowed_drafts
    from tide_platform.serving.admin import read_admin_key
    from tide_platform.serving.client import SglangClient
    from tide_platform.serving.launch import base_url
    from tide_platform.serving.ready import not_ready

    settings = load_settings(config)
    with SglangClient(base_url(settings), read_admin_key(settings), attempts=1) as client:
        reasons = list(not_ready(settings, client, allowed_drafts(settings) if settings.serving.k else ()))
    typer.echo("; ".join(reasons) or "ready")
    raise typer.Exit(1 if reasons else 0)
