"""``tide audit``: who did what."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    limit: Annotated[int, typer.Option(min=1, help="newest so many")] = 50,
    json_output: Annotated[
        bool, typer.Option("--json", help="one JSON object a line, details included")
    ] = False,
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """What was promoted, rolled back, rejected, frozen or given up, by whom and why; oldest first."""
    from tide_platform.control.ledger import opened

    settings = load_settings(config)
    with opened(settings.ledger.url) as ledger:
        entries = ledger.audit(settings.deployment, limit)
    if json_output:
        for entry in entries:
            typer.echo(json.dumps(vars(entry)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("when (UTC)", "who", "what", "window", "draft", "why")
    for entry in entries:
        when = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
        draft = (entry.digest or "")[:12]
        table.add_row(when, entry.actor, entry.action.value, entry.window or "", draft, entry.reason)
    Console().print(table)
