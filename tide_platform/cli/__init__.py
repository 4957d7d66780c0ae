"""``tide``: thin commands that parse, call the domain and print."""

import importlib
import sys

import typer

from tide_platform.config import TideError

app = typer.Typer(
    name="tide", no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False
)

# module of tide_platform.cli -> its `app` (a group) or `command` (one command)
GROUPS = ("target", "workload", "draft", "data", "samples", "config", "bench")
SERVING = ("serve", "capture", "traffic", "ingest", "maintain", "train", "gate", "doctor", "ready")
LOCAL = ("stack", "demo", "soak")
BY_HAND = ("status", "promote", "rollback", "freeze", "audit", "speculation", "notify")
KEEPING = ("backup", "restore", "metrics", "report")
COMMANDS = (*SERVING, *LOCAL, *BY_HAND, *KEEPING)


def _assemble() -> None:
    for name in GROUPS:
        app.add_typer(importlib.import_module(f"tide_platform.cli.{name}").app, name=name)
    for name in COMMANDS:
        app.command(name)(importlib.import_module(f"tide_platform.cli.{name}").command)


def main() -> None:
    """Run the CLI; a :class:`TideError` is one line on stderr and exit status 2."""
    _assemble()
    try:
        app()
    except TideError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
