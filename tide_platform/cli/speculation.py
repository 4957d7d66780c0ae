"""``tide speculation``: what it costs, brings and is set to, by batch size."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_platform.config import load_settings

if TYPE_CHECKING:
    from tide_platform.control.speculation import Row, Speculation


def command(
    minutes: Annotated[float, typer.Option(min=0, help="live requests of so many minutes")] = 60.0,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Costs of a round, acceptance, predicted and live speed-up by batch size, and the steps that SGLang may
    choose among. All speeds are over the target alone.
    """
    from tide_platform.control.ledger import opened
    from tide_platform.control.speculation import look, served_draft

    settings = load_settings(config)
    with opened(settings.ledger.url) as ledger:
        found = look(settings, ledger, served_draft(settings, ledger), minutes)
    if json_output:
        typer.echo(json.dumps(asdict(found)))
    else:
        _show(found, minutes)


def _show(found: "Speculation", minutes: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"draft {found.draft or 'unknown'}; {found.costs}", markup=False)
    console.print(found.acceptance.source, markup=False)
    if found.acceptance.by_k:
        lengths = ", ".join(f"{length:.3f}" for length in found.acceptance.by_k)
        console.print(f"acceptance length at k = 1, 2, ...: {lengths}")
    ks = sorted({k for row in found.rows for k in row.rounds if k})
    header = ["batch", "step ms", *(f"round k={k}" for k in ks), *(f"speed k={k}" for k in ks)]
    table = Table(*header, "steps", f"live, {minutes:g} min", "requests")
    for row in found.rows:
        table.add_row(*_row(row, ks))
    console.print(table)
    if not found.adaptive:
        console.print("serving.adaptive is off: `steps` is what SGLang would choose among")
    elif found.stale:
        console.print("STATE/adaptive.json has other steps; `tide serve` writes these when it starts again")


def _row(row: "Row", ks: list[int]) -> list[str]:
    live = ["-", ""] if row.live is None else [f"{row.live.value:.2f}", str(row.live.requests)]
    return [
        str(row.batch),
        f"{row.step_ms:.1f}",
        *(f"{row.rounds[k]:.2f}" if k in row.rounds else "-" for k in ks),
        *(f"{row.speeds[k]:.2f}" if k in row.speeds else "-" for k in ks),
        ", ".join(map(str, row.steps)) or "-",
        *live,
    ]
