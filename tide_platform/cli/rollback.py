"""``tide rollback``: the draft before this one."""

from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    reason: Annotated[str, typer.Option("--reason", help="why, for the audit")],
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
) -> None:
    """Serve the previous champion on all servers at once. The draft that is served now is barred: it is not
    promoted again without `tide promote --unbar`.
    """
    from tide_platform.control.audit import by_hand
    from tide_platform.control.hands import roll_back
    from tide_platform.control.ledger import opened

    settings = load_settings(config)
    with opened(settings.ledger.url) as ledger:
        done = roll_back(settings, ledger, by_hand(), reason)
    typer.echo(f"{settings.deployment}: {done.served} is served again; {done.previous} is barred")
