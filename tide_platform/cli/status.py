"""``tide status``: one screen."""

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_platform.config import load_settings

if TYPE_CHECKING:
    from tide_platform.control.overview import Overview, ServerView


def command(
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """What is served, since when, its acceptance now and at promotion, windows by state, last verdicts.

    Exit status 1 where a server does not answer, or the servers do not serve one draft.
    """
    from tide_platform.control.ledger import opened
    from tide_platform.control.overview import look

    settings = load_settings(config)
    with opened(settings.ledger.url) as ledger:
        overview = look(settings, ledger)
    if json_output:
        typer.echo(json.dumps(asdict(overview)))
    else:
        _show(overview)
    if not overview.agreed:
        raise typer.Exit(1)


def _show(overview: "Overview") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    since = f"since {_time(overview.since)}" if overview.since else "since it was started"
    console.print(f"{overview.deployment}: draft {overview.champion or 'unknown'}, served {since}")
    if overview.at_promotion:
        console.print(f"acceptance length when it was promoted: {overview.at_promotion:.3f}")
    if overview.frozen:
        console.print(f"FROZEN by {overview.frozen.actor}: {overview.frozen.reason}")
    if overview.unfinished:
        console.print(
            f"a rollout of {overview.unfinished.challenger} is at step {overview.unfinished.step}, since "
            f"{_time(overview.unfinished.started_at)}"
        )
    servers = Table("server", "draft", "capture", "requests", "acceptance length", "ms a token p50", "p99")
    for server in overview.servers:
        servers.add_row(*_row(server, overview.champion))
    console.print(servers)
    for fallen in overview.fallen:
        console.print(f"fallen: {fallen}", markup=False)
    if overview.suspected:
        console.print(
            f"SUSPECTED: {overview.suspected}; it is compared with the draft before it", markup=False
        )
    if not overview.collection.on:
        console.print(f"capture is off: {overview.collection.reason}", markup=False)
    states = ", ".join(f"{count} {state}" for state, count in sorted(overview.windows.items()))
    console.print(f"windows: {states or 'none yet'}")
    for verdict in overview.verdicts:
        console.print(f"{verdict.window}: {verdict.summary}", markup=False)


def _row(server: "ServerView", champion: str | None) -> list[str]:
    if server.problem:
        return [server.url, "no answer", "", "", server.problem, "", ""]
    live = server.live
    draft = f"{(server.draft or 'none')[:12]}{'' if server.draft == champion else ' (not the champion)'}"
    figures = ["", "", "", ""]
    if live is not None and live.requests:
        figures = [
            str(live.requests),
            f"{live.acceptance_length:.3f}" if live.acceptance_length else "-",
            *(f"{ms:.1f}" if ms is not None else "-" for ms in (live.token_ms_p50, live.token_ms_p99)),
        ]
    return [server.url, draft, "on" if server.capturing else "off", *figures]


def _time(at: float) -> str:
    hours = (time.time() - at) / 3600
    return f"{datetime.fromtimestamp(at, UTC).strftime('%Y-%m-%d %H:%M:%S')} UTC ({hours:.1f} h ago)"
