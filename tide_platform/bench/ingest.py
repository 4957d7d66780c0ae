"""Segments into the dataset on object storage, by the real ingest, against boto3's multipart put of the same
bytes to the same server.

A round moves sealed segments of the asked size into the spool folder of a running ingest and takes the time
until the last is stored, found in the dataset and deleted (reading, checksums, fragments, commit, reading
back), or until boto3's transfer manager has put the same files, one after the other; the order alternates.
"""

import itertools
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from tide_platform.bench.object_storage import object_storage
from tide_platform.bench.report import Report, alternation, paired_interval, paired_ratio
from tide_platform.bench.samples import random_sample
from tide_platform.capture.record import StreamMeta
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings
from tide_platform.config.schema import Storage

_STREAM = StreamMeta("bench", hidden_size=2048, vocab_size=151_936, aux_layer_ids=(2, 14, 25), teacher_k=64)
_ROWS = 512  # of a sample
_SEGMENT_BYTES = 32 << 20


def run(folder: Path, *, bytes: int, rounds: int) -> Report:
    """``bytes`` a round and side; at least 2 rounds give an interval."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rates: dict[str, list[float]] = {"ingest": [], "boto3": []}
    cpu: dict[str, list[float]] = {"ingest": [], "boto3": []}
    numbers = itertools.count()
    try:
        with object_storage(folder / "objects") as storage, _ingest(folder, storage) as spool:
            sides = {"ingest": partial(_ingest_round, spool), "boto3": partial(_boto3_round, storage)}
            for call in sides.values():
                _timed(call, _seal(folder / "sealed", 1 << 20, numbers))  # imports, bucket, dataset
            for of_ingest in alternation(rounds):
                side = "ingest" if of_ingest else "boto3"
                rate, used = _timed(sides[side], _seal(folder / "sealed", bytes, numbers))
                rates[side].append(rate)
                cpu[side].append(used)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratio = {"ingest": paired_ratio(rates["ingest"], rates["boto3"])}
    intervals = {"ingest": paired_interval(rates["ingest"], rates["boto3"])} if rounds > 1 else {}
    notes = [
        f"medians, MB/s: ingest {statistics.median(rates['ingest']):.0f}, boto3 "
        f"{statistics.median(rates['boto3']):.0f}; client CPU seconds a GB: ingest "
        f"{statistics.median(cpu['ingest']):.1f}, boto3 {statistics.median(cpu['boto3']):.1f}",
        "the server (SeaweedFS) shares the machine's cores with both clients",
    ]
    return Report("ingest", ratio, intervals, {"mb_s": rates, "client_cpu_s_gb": cpu}, notes)


@contextmanager
def _ingest(folder: Path, storage: Storage) -> Iterator[Path]:
    """A running ingest; its spool folder."""
    from tide_platform.ingest.service import Ingest

    settings = Settings(state=folder / "state", storage=storage)
    settings.ingest.commit_seconds, settings.ingest.poll_seconds = 0.0, 0.005
    settings.maintain.interval_s = 0.0
    stop = threading.Event()
    thread = threading.Thread(target=Ingest(settings, stop).run)
    thread.start()
    try:
        yield settings.spool_folder
    finally:
        stop.set()
        thread.join()


def _timed(call: Callable[[list[Path]], None], segments: list[Path]) -> tuple[float, float]:
    """MB/s, and client CPU seconds a GB."""
    total = sum(path.stat().st_size for path in segments)
    began, used = time.perf_counter(), time.process_time()
    call(segments)
    elapsed, used = time.perf_counter() - began, time.process_time() - used
    for path in segments:
        path.unlink(missing_ok=True)
    return total / elapsed / 1e6, used / total * 1e9


def _ingest_round(spool: Path, segments: list[Path]) -> None:
    moved = [path.rename(spool / path.name) for path in segments]
    while any(path.exists() for path in moved):
        time.sleep(0.005)


def _boto3_round(storage: Storage, segments: list[Path]) -> None:
    from tide_platform.store.objects import ObjectStore

    objects = ObjectStore(storage)
    objects.ensure_bucket()
    key = f"bench/{secrets.token_hex(4)}"
    for path in segments:
        objects.upload(path, f"{key}/{path.name}")


def _seal(folder: Path, size: int, numbers: "itertools.count[int]") -> list[Path]:
    """Segments of ``size`` bytes in all, of samples whose bytes do not compress."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(next(numbers))
    paths, total = [], 0
    while total < size:
        segment = SegmentWriter(folder, _STREAM)
        while segment.bytes < min(_SEGMENT_BYTES, size - total):
            segment.append(random_sample(_STREAM, rng, f"bench-{next(numbers)}", _ROWS))
        total += segment.bytes
        paths.append(segment.seal())
    return paths
