"""``tide demo``: one adaptation cycle on this machine, measured before and after."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    workload: Annotated[str, typer.Option(help="maths, code, or a JSONL file of prompts")] = "maths",
    samples: Annotated[int, typer.Option(min=16, help="prompts of traffic; one window")] = 200,
    k: Annotated[
        int | None, typer.Option(min=1, max=16, help="speculative steps (setting: serving.k)")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="leave the stack up; end it with `tide stack down`")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="configuration file")] = None,
    state: Annotated[Path | None, typer.Option(help="folder of the stack's state (setting: state)")] = None,
    ports: Annotated[str, typer.Option(help="settings: the configured ones; auto: any free")] = "settings",
) -> None:
    """Serve, capture, fine-tune, validate, deploy a draft; writes STATE/demo/summary.json and index.html."""
    from tide_platform.config import load_settings
    from tide_platform.local.interrupt import EXIT_STATUS, Interrupted, interruptible

    if ports not in ("settings", "auto"):
        raise typer.BadParameter("settings or auto", param_hint="--ports")
    settings = load_settings(config)
    settings.state = state or settings.state
    settings.serving.k = k or settings.serving.k
    try:
        with interruptible():
            from tide_platform.local.demo.plan import Options
            from tide_platform.local.demo.run import run_demo, show_summary
            from tide_platform.local.demo.screen import Screen

            screen = Screen()
            summary, addresses = run_demo(
                settings, Options(workload, samples, keep), screen, auto_ports=ports == "auto"
            )
            show_summary(summary, settings.state.absolute() / "demo", addresses, screen)
            if keep:
                screen.say("the stack is left up; end it with: tide stack down")
    except Interrupted:
        typer.echo("interrupted: all that was started has been ended", err=True)
        raise typer.Exit(EXIT_STATUS) from None
