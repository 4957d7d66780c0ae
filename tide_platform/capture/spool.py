"""The spool: a process that drains the ring into durable segments.

``python -m tide_platform.capture.spool --ring PATH --folder DIR …``

What a crash costs, by rule:

- A sample in a sealed segment is safe. So is one in the ``.open`` segment once it was handed to the disk,
  which happens when the ring is empty or a few MiB are gathered: the next spool cuts the torn tail, says so,
  and seals the rest.
- The ring's ``tail`` moves past a record once its content is in this process's memory. So a spool that is
  killed loses the requests in flight and the samples not yet handed over; the ring and the journal tell the
  next spool how many these were, and it counts them as ``spool_restarted``. Nothing is stored with a part
  missing, and unread records wait in the ring.
- A server that restarts makes a new ring; unread records of the old one are drained first.
"""

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import get_args

from tide_platform.capture.folder import STATUS_FILE, sealed_segments
from tide_platform.capture.packing import AuxFormat
from tide_platform.capture.service import DiskStuck, Spool, SpoolSettings
from tide_platform.config import TideError

__all__ = ["STATUS_FILE", "Spool", "SpoolSettings", "main", "sealed_segments"]
log = logging.getLogger("tide.spool")


def main(arguments: list[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT, then drains, seals and returns 0."""
    defaults = SpoolSettings()
    parser = argparse.ArgumentParser(prog="python -m tide_platform.capture.spool")
    parser.add_argument("--ring", type=Path, required=True, help="the ring's file; may appear later")
    parser.add_argument("--folder", type=Path, required=True, help="where segments are written")
    parser.add_argument("--segment-bytes", type=int, default=defaults.segment_bytes)
    parser.add_argument("--segment-seconds", type=float, default=defaults.segment_seconds)
    parser.add_argument("--max-sample-tokens", type=int, default=defaults.max_tokens)
    parser.add_argument("--aux-format", choices=get_args(AuxFormat), default=defaults.aux_format)
    parser.add_argument("--validation-share", type=float, default=defaults.validation_share)
    parser.add_argument("--spool-bytes", type=int, default=defaults.spool_bytes)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.umask(0o077)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    settings = SpoolSettings(
        options.segment_bytes,
        options.segment_seconds,
        options.max_sample_tokens,
        options.aux_format,
        options.validation_share,
        options.spool_bytes,
    )
    try:
        spool = Spool(options.ring, options.folder, settings, stop)
    except TideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    spool.recover()
    try:
        while not stop.is_set():
            if not spool.step():
                stop.wait(spool.pause())
    except DiskStuck as error:
        log.error("%s", error)
    spool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
