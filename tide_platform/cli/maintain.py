"""``tide maintain``: upkeep of the dataset."""

import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_platform.config import Settings, TideError, load_settings

if TYPE_CHECKING:
    from tide_platform.store.upkeep import Upkeep

_SLICE_SECONDS = 5.0
log = logging.getLogger("tide.maintain")


def command(
    config: Annotated[Path | None, typer.Option("--config", help="configuration file")] = None,
    once: Annotated[bool, typer.Option("--once", help="one whole pass, then end")] = False,
) -> None:
    """Expire, compact, clean up and recover the dataset; runs until SIGTERM.

    `tide ingest` does the same between its commits unless `maintain.interval_s` is 0.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from tide_platform.control.dataset import pinned_versions
    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.objects import ObjectStore
    from tide_platform.store.upkeep import LEASE_SECONDS, Upkeep

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = load_settings(config)
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    upkeep = Upkeep(settings, open_store(settings), objects, partial(pinned_versions, settings))
    interval = settings.maintain.interval_s or LEASE_SECONDS
    while not stop.is_set():
        try:
            finished = upkeep.run(_SLICE_SECONDS, everything=once)
        except TideError as error:
            if once:
                raise
            log.error("%s; trying again", error)
            upkeep.counts.failures += 1
            finished = True
        if finished and once:
            break
        _rest(settings, upkeep, stop, interval if finished else 0)
    held = upkeep.lease.epoch
    upkeep.lease.release()
    counts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in upkeep.counts.to_json().items())
    typer.echo(f"maintain: {counts}" if held or not once else "maintain: another process does it now")


def _rest(settings: Settings, upkeep: "Upkeep", stop: threading.Event, seconds: float) -> None:
    """Waits, and writes the status file meanwhile: the process's sign of life, with its counts."""
    from tide_platform.capture.folder import write_status
    from tide_platform.ingest.counts import BEAT_SECONDS
    from tide_platform.metrics.files import MAINTAIN_STATUS

    settings.state.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    while True:
        counts = {f"upkeep_{name}": value for name, value in upkeep.counts.to_json().items()}
        status = {"pid": os.getpid(), "at": time.time(), **counts}
        try:
            write_status(settings.state / MAINTAIN_STATUS, status)
        except OSError as error:
            log.error("%s", error)
        left = end - time.monotonic()
        if left <= 0 or stop.wait(min(left, BEAT_SECONDS)):
            return
