"""A tiny server: interleaved requests into a ring, as fast as it goes, each one logged. Killed by tests.

``python -m tests.faults.spool_producer RING LOG FIRST`` numbers its samples from FIRST. A line of the log is
``begin N`` (before it begins), ``begun N``, ``end N`` (the ring took it whole) or ``lost N`` (the ring was
full).
"""

import signal
import sys
import threading
import time
from pathlib import Path

from tests.synthetic import STREAM, begin, finish, make_sample, write_rows
from tide_platform.capture.record import Sample
from tide_platform.capture.ring import Ring
from tide_platform.capture.writer import RingWriter

IN_FLIGHT = 6


def numbered(number: int) -> Sample:
    return make_sample(str(number), 4 + number * 7 % 90, seed=number, verify_rounds=number % 11)


def main(ring_path: str, log_path: str, first: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    writer = RingWriter(Ring.create(ring_path, 1 << 18, STREAM))
    next_number, open_ = int(first), {}
    with Path(log_path).open("a", buffering=1) as log:
        while open_ or not stop.is_set():
            while len(open_) < IN_FLIGHT and not stop.is_set():
                sample = numbered(next_number)
                log.write(f"begin {next_number}\n")
                if begin(writer, sample):
                    log.write(f"begun {next_number}\n")
                    open_[next_number] = (sample, 0)
                else:
                    writer.discard(sample.meta.request_id, "ring_full")
                    log.write(f"lost {next_number}\n")
                next_number += 1
            for number, (sample, at) in list(open_.items()):
                tokens = sample.meta.num_tokens
                if at < tokens:
                    write_rows(writer, sample, at, min(at + 5, tokens), confirmed=True)
                    open_[number] = (sample, at + 5)
                else:
                    log.write(f"{'end' if finish(writer, sample, tokens) else 'lost'} {number}\n")
                    del open_[number]
            time.sleep(0.0005)


if __name__ == "__main__":
    main(*sys.argv[1:])
