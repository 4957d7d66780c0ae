"""``tide ingest``: sealed segments into the dataset."""

import logging
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
    once: Annotated[bool, typer.Option("--once", help="store the segments that are there, then end")] = False,
) -> None:
    """Store captured samples in the dataset, each exactly once; runs until SIGTERM.

    Several may run, on one spool folder or on several machines.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from tide_platform.control.dataset import pinned_versions
    from tide_platform.ingest.service import Ingest

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = load_settings(config)
    ingest = Ingest(settings, stop, partial(pinned_versions, settings))
    ingest.run(once)
    counts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in ingest.counts.items())
    typer.echo(f"ingest: {counts}")
