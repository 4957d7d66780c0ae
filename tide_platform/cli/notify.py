"""``tide notify``: does a message arrive?"""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    text: Annotated[str, typer.Argument(help="what to say")] = "A test message.",
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Send a message to all addresses of TIDE_NOTIFY__URLS and notify.urls_file.

    Exit status 1 where one of them did not take it, or there is none.
    """
    from tide_platform.control.notify import VARIABLE, Message, Notifier

    settings = load_settings(config)
    outcome = Notifier.of(settings).tell(Message(f"{settings.deployment}: tide notify", text, "info"))
    failed = f", not to {', '.join(outcome.failed)}" if outcome.failed else ""
    typer.echo(f"delivered to {outcome.taken} addresses{failed}")
    if not outcome.taken and not outcome.failed:
        typer.echo(f"nobody is told of anything: give addresses in {VARIABLE} or notify.urls_file", err=True)
    raise typer.Exit(0 if outcome.taken and not outcome.failed else 1)
