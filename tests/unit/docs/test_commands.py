"""Every `tide` command that the docs show exists, with the options shown."""

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from tide_platform import cli

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "drafts" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown() -> list[tuple[str, str]]:
    """(page, command line) of each line that starts with ``tide`` inside a code block."""
    found = []
    for page in PAGES:
        inside = False
        for line in page.read_text().splitlines():
            if line.startswith("```"):
                inside = not inside
            elif inside and line.startswith("tide "):
                found.append((page.name, line.split("#")[0].strip()))
    return found


@pytest.fixture(scope="module")
def root() -> click.Group:
    app = typer.Typer()
    for name in cli.GROUPS:
        app.add_typer(importlib.import_module(f"tide_platform.cli.{name}").app, name=name)
    for name in cli.COMMANDS:
        app.command(name)(importlib.import_module(f"tide_platform.cli.{name}").command)
    return typer.main.get_command(app)  # type: ignore[return-value]


@pytest.mark.parametrize(("page", "line"), shown())
def test_the_command_exists_with_its_options(root: click.Group, page: str, line: str) -> None:
    words = [word.strip("[]") for word in shlex.split(line)[1:]]
    command: click.Command = root
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"{page}: `{line}`: there is no `{name}`"
        command = command.commands[name]
    known = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}
    asked = [w for w in words if re.match(r"--[a-z]", w)]
    assert set(asked) <= known, f"{page}: `{line}`: {set(asked) - known} is no option"


def test_the_docs_show_commands() -> None:
    assert len(shown()) > 10
