"""``tide promote``: serve a registered draft by hand."""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    digest: Annotated[str, typer.Argument(help="of a registered draft, or its beginning")],
    reason: Annotated[str, typer.Option("--reason", help="why, for the audit")],
    unbar: Annotated[bool, typer.Option("--unbar", help="even if it was rolled back before")] = False,
    now: Annotated[bool, typer.Option("--now", help="do not watch the first server first")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Serve a draft on all servers without a verdict of the gate; one server is watched first."""
    from tide_platform.control.audit import by_hand
    from tide_platform.control.hands import promote
    from tide_platform.control.ledger import opened

    settings = load_settings(config)
    with opened(settings.ledger.url) as ledger:
        done = promote(settings, ledger, digest, by_hand(), reason, unbar=unbar, watched=not now)
    before = f" in place of {done.previous}" if done.previous else ", as before"
    typer.echo(f"{settings.deployment}: {done.served} is served{before}")
