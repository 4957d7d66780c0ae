"""``tide doctor``: what of a deployment would not work, with the mend."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tide_platform.gate.doctor import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "error": "red"}


def command(
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; TIDE_CONFIG names one as well.")
    ] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Look at this draft, not at the one served next.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Overrides `target`.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at the Kubernetes cluster of `cluster` instead.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at configuration, target, draft, store, disk before any run. Exit status 1: something is wrong."""
    from tide_platform.config import ConfigError, load_settings
    from tide_platform.gate.cluster_doctor.diagnose import diagnose_cluster
    from tide_platform.gate.doctor import Finding, diagnose

    try:
        settings = load_settings(config)
    except ConfigError as error:
        findings = [Finding("configuration", "error", str(error))]
    else:
        findings = list(diagnose_cluster(settings) if cluster else diagnose(settings, draft, target))
    wrong = any(finding.grade == "error" for finding in findings)
    if json_output:
        typer.echo(json.dumps({"ok": not wrong, "findings": [f.to_json() for f in findings]}, indent=2))
    else:
        _print(findings)
    raise typer.Exit(1 if wrong else 0)


def _print(findings: "list[Finding]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("", "what", "found", "mend")
    for finding in findings:
        grade = Text(finding.grade, style=_COLOURS[finding.grade])
        table.add_row(grade, finding.about, Text(finding.text), Text(finding.mend))
    Console().print(table)
