"""``tide report``: the page for who looks after a week."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    out: Annotated[
        Path | None, typer.Option("--out", help="the page; without it report.html in the state folder")
    ] = None,
    since: Annotated[str, typer.Option("--since", help="how far back: 90m, 24h, 7d, 2w")] = "7d",
    json_output: Annotated[
        bool, typer.Option("--json", help="print the figures as one JSON object; no page without --out")
    ] = False,
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """What is served, how well over time, what the loop did and what it saved, as one HTML file.

    From the ledger alone: no server is asked, none need be up.
    """
    from tide_platform.control.ledger import opened
    from tide_platform.report.gather import gather
    from tide_platform.report.page import write_report
    from tide_platform.report.since import seconds

    settings = load_settings(config)
    back_s = seconds(since)
    with opened(settings.ledger.url) as ledger:
        report = gather(settings, ledger, back_s)
    if json_output:
        typer.echo(json.dumps(report.to_json()))
    if out is not None or not json_output:
        path = out or settings.state / "report.html"
        write_report(path, report)
        typer.echo(f"report: {path}", err=json_output)
