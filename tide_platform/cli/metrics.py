"""``tide metrics``: the exporter for Prometheus."""

import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from tide_platform.config import load_settings


def command(
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="overrides the setting metrics.port")
    ] = None,
) -> None:
    """Tell Prometheus of the deployment, under /metrics; runs until SIGTERM."""
    from tide_platform.metrics.exporter import start

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = load_settings(config)
    if port is not None:
        settings.metrics.port = port
    server = start(settings)
    typer.echo(f"http://{settings.metrics.host}:{settings.metrics.port}/metrics")
    stop.wait()
    server.shutdown()
