"""``tide stack``: the local stack up, down, or what it does."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import Settings, load_settings


class Action(StrEnum):
    up = "up"
    down = "down"
    status = "status"


def command(
    action: Annotated[Action, typer.Argument(help="up: start and leave running; down: end; status: show")],
    config: Annotated[Path | None, typer.Option(help="configuration file")] = None,
    state: Annotated[Path | None, typer.Option(help="folder of the stack's state (setting: state)")] = None,
    ports: Annotated[
        str, typer.Option(help="settings: those of the configuration; auto: any free ones")
    ] = "settings",
    no_server: Annotated[bool, typer.Option("--no-server", help="without SGLang and ingest")] = False,
) -> None:
    """Object storage, MLflow, Dagster, SGLang and ingest on this machine."""
    if ports not in ("settings", "auto"):
        raise typer.BadParameter("settings or auto", param_hint="--ports")
    settings = load_settings(config)
    if state:
        settings.state = state
    if action is Action.up:
        _up(settings, auto_ports=ports == "auto", server=not no_server)
    elif action is Action.down:
        _down(settings)
    else:
        _status(settings)


def _up(settings: Settings, *, auto_ports: bool, server: bool) -> None:
    from tide_platform.local import services
    from tide_platform.local.interrupt import EXIT_STATUS, Interrupted, interruptible
    from tide_platform.local.stack import Stack
    from tide_platform.serving.target import prepare_target

    if server and settings.target is None:
        prepare_target(typer.echo)
    try:
        with interruptible(), Stack(settings, typer.echo, auto_ports=auto_ports) as stack:
            stack.open(die_with_parent=False)
            stack.start(services.ALL if server else services.PLATFORM)
            stack.keep()
            for name, address in stack.addresses().items():
                typer.echo(f"{name:15} {address}")
            typer.echo(f"logs            {stack.layout.logs}")
            typer.echo(
                f"to use it       set -a; . {stack.layout.secrets}; TIDE_CONFIG={stack.layout.config}; set +a"
            )
    except Interrupted:
        typer.echo("interrupted: all that was started has been ended", err=True)
        raise typer.Exit(EXIT_STATUS) from None


def _down(settings: Settings) -> None:
    from tide_platform.local.layout import Layout
    from tide_platform.local.stack import end_stale, stack_states

    layout = Layout(settings.state.absolute())
    up = bool(stack_states(layout))
    end_stale(layout, typer.echo)
    typer.echo("ended" if up else f"no stack of {layout.state} was up")


def _status(settings: Settings) -> None:
    from tide_platform.local.layout import Layout
    from tide_platform.local.stack import addresses, stack_states

    layout = Layout(settings.state.absolute())
    states = stack_states(layout)
    if not states:
        typer.echo(f"no stack of {layout.state} is up")
        raise typer.Exit(1)
    for name, state in states.items():
        typer.echo(f"{name:15} {state.name.lower():9} {state.description}")
    for name, address in addresses(load_settings(layout.config, environ={})).items():
        typer.echo(f"{name:15} {address}")
