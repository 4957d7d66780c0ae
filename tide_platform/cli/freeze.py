"""``tide freeze``: nothing is promoted by itself."""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    reason: Annotated[str, typer.Option("--reason", help="why, for the audit")],
    off: Annotated[bool, typer.Option("--off", help="let it go on")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Windows are trained and judged, but no draft is promoted until `tide freeze --off`. A hand may still
    promote, and a bad draft is still rolled back.
    """
    from tide_platform.control.audit import by_hand
    from tide_platform.control.ledger import opened

    settings = load_settings(config)
    with opened(settings.ledger.url) as ledger:
        if not off:
            ledger.guard.freeze(settings.deployment, by_hand(), reason)
            typer.echo(f"{settings.deployment}: frozen")
        elif ledger.guard.thaw(settings.deployment, by_hand(), reason):
            typer.echo(f"{settings.deployment}: goes on")
        else:
            typer.echo(f"{settings.deployment}: was not frozen")
