"""``tide serve``: the SGLang server with capture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tide_platform.evaluation.speculation import Acceptance


def command(
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; TIDE_CONFIG names one as well.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Overrides `target`.")] = None,
    draft: Annotated[
        Path | None, typer.Option(help="Overrides `draft`, and a champion deployed since.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=55535, help="Overrides `serving.port`.")] = None,
    k: Annotated[
        int | None, typer.Option(min=0, max=16, help="Overrides `serving.k`; 0 serves the target alone.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Check everything, write the plugin's file, print the commands.")
    ] = False,
) -> None:
    """Start the SGLang server with the capture plugin and its spool; runs until SIGTERM or Ctrl-C."""
    from tide_platform.config import load_settings
    from tide_platform.serving.serve import serve, show_plan

    settings = load_settings(config)
    if target is not None:
        settings.target = target
    if port is not None:
        settings.serving.port = port
    if k is not None:
        settings.serving.k = k

    def known(digest: str) -> "Acceptance":
        from tide_platform.control.speculation import known_acceptance

        return known_acceptance(settings, digest)

    def champion() -> Path | None:
        if settings.cluster is None or not settings.serving.k:  # on one machine the pointer is right
            return None
        from tide_platform.control.champion import starting_draft

        return starting_draft(settings)

    if dry_run:
        show_plan(settings, draft or champion(), typer.echo, known)
        return
    raise typer.Exit(serve(settings, typer.echo, draft, known, champion))
