"""``tide gate``: capture, training, export and serving agree, or not."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer


def command(
    draft: Annotated[Path, typer.Option(help="Folder of the draft to check.")],
    target: Annotated[Path | None, typer.Option(help="Overrides `target`.")] = None,
    parent: Annotated[
        Path | None,
        typer.Option(help="The draft that it was trained from: map, rope and layers must be its."),
    ] = None,
    reference: Annotated[
        Literal["transformers", "engine"],
        typer.Option(help="What captured rows are compared with; engine: where transformers can't run it."),
    ] = "transformers",
    k: Annotated[int | None, typer.Option(min=1, max=16, help="Overrides `serving.k`.")] = None,
    config: Annotated[Path | None, typer.Option(help="The deployment's configuration file.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON report to this file as well.")] = None,
) -> None:
    """Check a draft before a long run: minutes on a CPU, a server of its own. Exit status 1: it fails."""
    from tide_platform.config import load_settings
    from tide_platform.gate.run import run_gate

    settings = load_settings(config)
    if k is not None:
        settings.serving.k = k

    def say(line: str) -> None:
        typer.echo(line, err=json_output)

    report = run_gate(settings, draft, target, parent, reference, say)
    text = json.dumps(report.to_json(), indent=2)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    if json_output:
        typer.echo(text)
    else:
        names = ", ".join(f"{check.name} ({check.on})" for check in report.failures)
        verdict = "passed" if report.passed else f"failed: {names}"
        typer.echo(f"gate {verdict}; draft {report.draft_digest}, {report.seconds:.0f} s")
    raise typer.Exit(0 if report.passed else 1)
