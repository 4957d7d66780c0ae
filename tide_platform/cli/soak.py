"""``tide soak``: an hour of the loop left to itself, on this machine."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path | None, typer.Option(help="configuration file")] = None,
    state: Annotated[Path | None, typer.Option(help="folder of the stack's state (setting: state)")] = None,
    ports: Annotated[str, typer.Option(help="settings: the configured ones; auto: any free")] = "settings",
) -> None:
    """Shift the traffic, poison a window, sabotage a draft; writes STATE/soak/soak.json.

    Exit status 1 where something did not hold. At most 75 minutes.
    """
    from tide_platform.config import load_settings
    from tide_platform.local.interrupt import EXIT_STATUS, Interrupted, interruptible

    if ports not in ("settings", "auto"):
        raise typer.BadParameter("settings or auto", param_hint="--ports")
    settings = load_settings(config)
    settings.state = state or settings.state
    try:
        with interruptible():
            from tide_platform.local.demo.screen import Screen
            from tide_platform.local.soak.run import run_soak

            screen = Screen()
            result = run_soak(settings, screen, auto_ports=ports == "auto")
    except Interrupted:
        typer.echo("interrupted: all that was started has been ended", err=True)
        raise typer.Exit(EXIT_STATUS) from None
    if result.problem:
        screen.say(result.problem)
    for check in result.checks:
        screen.say(f"{'holds' if check.holds else 'DOES NOT HOLD':14} {check.name}")
    screen.say(f"{settings.state.absolute() / 'soak' / 'soak.json'}: holds: {str(result.holds).lower()}")
    if not result.holds:
        raise typer.Exit(1)
