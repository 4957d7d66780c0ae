"""``tide target``: the served model's folder."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The target: the model that is served.")


@app.callback()
def _group() -> None:
    """A group, although it has one command."""


@app.command()
def prepare(
    source: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Check this Hugging Face folder in place, instead of making the default target."
        ),
    ] = None,
) -> None:
    """Make SmolLM2-135M-Instruct ready in the cache (moved by TIDE_HOME), or check a folder of yours."""
    from tide_platform.serving.target import prepare_target
    from tide_platform.serving.target_folder import check_target

    if source is None:
        target = prepare_target(typer.echo)
        typer.echo(f"target ready: {target.folder} (digest {target.digest})")
    else:
        target = check_target(source.expanduser().resolve())
        typer.echo(f"target usable: {target.architecture}, digest {target.digest}")
        typer.echo(f"to serve it, put `target: {target.folder}` into the configuration")
