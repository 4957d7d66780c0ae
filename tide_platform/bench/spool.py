"""Durable bytes a second of the spool against the same disk written raw with O_DIRECT and fdatasync.

A round of the spool: a producer in a process of its own fills the ring with samples as fast as it goes, the
spool in another drains it for ``seconds``. What counts is the size of the sealed segments over the time from
its first record to its last seal. The raw round writes files of the same size, one after the other, from one
buffer, each with its space reserved first, as the spool does.
"""

import multiprocessing
import os
import shutil
import statistics
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.bench.report import Report, alternation, paired_interval, paired_ratio
from tide_platform.bench.samples import plain_meta
from tide_platform.capture.disk import aligned
from tide_platform.capture.folder import sealed_segments
from tide_platform.capture.record import SampleMeta, StreamMeta
from tide_platform.capture.ring import Ring
from tide_platform.capture.spool import Spool, SpoolSettings
from tide_platform.capture.writer import RingWriter

FORMATS = ("bf16", "int8", "int4")
_STREAM = StreamMeta("bench", hidden_size=2048, vocab_size=151_936, aux_layer_ids=(2, 14, 25), teacher_k=64)
_RING_BYTES = 256 << 20
_SAMPLE_ROWS, _RECORD_ROWS = 512, 64
_IN_FLIGHT = 8  # requests that are written in turn
_WRITE_BYTES = 8 << 20
_KEEP_BYTES = 1 << 30  # of sealed segments: the bench plays ingest and deletes the oldest


def run(folder: Path, *, seconds: float, rounds: int) -> Report:
    """Alternates spool and raw rounds in ``folder``, which lies on the disk in question."""
    rates: dict[str, list[float]] = {form: [] for form in FORMATS}
    raw: dict[str, list[float]] = {form: [] for form in FORMATS}
    cpu: dict[str, list[float]] = {form: [] for form in FORMATS}
    folder.mkdir(parents=True, exist_ok=True)
    for form in FORMATS:
        for spooled in alternation(rounds):
            if spooled:
                rate, used = _spool(folder, form, seconds)
                rates[form].append(rate)
                cpu[form].append(used)
            else:
                raw[form].append(_raw(folder, seconds))
    ratios = {form: paired_ratio(rates[form], raw[form]) for form in FORMATS}
    intervals = {form: paired_interval(rates[form], raw[form]) for form in FORMATS} if rounds > 1 else {}
    notes = [
        "judged: bf16; int8 and int4 write fewer bytes for the same rows, their packing is processor time",
        f"medians, MB/s: raw {statistics.median(raw['bf16']):.0f}, "
        + ", ".join(f"{form} {statistics.median(rates[form]):.0f}" for form in FORMATS),
    ]
    measured: dict[str, Any] = {"spool_mb_s": rates, "raw_mb_s": raw, "spool_cpu_share": cpu}
    return Report("spool", ratios, intervals, measured, notes)


def _spool(folder: Path, form: str, seconds: float) -> tuple[float, float]:
    """MB/s made durable; share of a core that the spool's process took."""
    context = multiprocessing.get_context("spawn")
    home = folder / "spool-bench"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    stop, queue = context.Event(), context.Queue()
    processes = [
        context.Process(target=_produce, args=(home / "ring", stop), daemon=True),
        context.Process(target=_drain, args=(home, form, seconds, stop, queue), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        return queue.get(timeout=seconds + 60)
    finally:
        stop.set()
        for process in processes:
            process.join()
        shutil.rmtree(home, ignore_errors=True)


def _produce(path: Path, stop: Event) -> None:
    ring = Ring.create(path, _RING_BYTES, _STREAM)
    writer = RingWriter(ring)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(_RECORD_ROWS, 3 * _STREAM.hidden_size)).astype(np.float32)
    aux = (values.view(np.uint32) >> 16).astype(np.uint16)
    ids = rng.integers(0, _STREAM.vocab_size, (_RECORD_ROWS, _STREAM.teacher_k), dtype=np.int32)
    logp = rng.normal(size=(_RECORD_ROWS, _STREAM.teacher_k)).astype(np.float16)
    token_logp = np.zeros(_RECORD_ROWS, np.float16)
    tokens, number = np.zeros(_RECORD_ROWS, np.int32), 0
    while not stop.is_set():
        metas = {f"r{number + at}": _begun(f"s{number + at}") for at in range(_IN_FLIGHT)}
        number += _IN_FLIGHT
        for rid, meta in metas.items():
            writer.begin(rid, meta)
        for pos in range(0, _SAMPLE_ROWS, _RECORD_ROWS):
            for rid in metas:
                _wait_for_room(writer, stop)
                writer.write(rid, pos, aux, pos, ids, logp, token_logp, pos, tokens)
        for rid, meta in metas.items():
            writer.finish(rid, replace(meta, finish_reason="stop"), _SAMPLE_ROWS, tokens[:0])


def _wait_for_room(writer: RingWriter, stop: Event) -> None:
    """A server would drop; here dropped samples would only take the producer's time from the spool's core."""
    while writer.ring_used_bytes() > writer.capacity * 3 // 4 and not stop.is_set():
        time.sleep(0.0005)


def _drain(home: Path, form: str, seconds: float, stop: Event, queue: Any) -> None:
    settings = SpoolSettings(aux_format=form, segment_seconds=60.0)  # type: ignore[arg-type]
    spool = Spool(home / "ring", home / "segments", settings)
    while not (home / "ring").exists() or not spool.step():
        time.sleep(0.005)
    begin, used = time.monotonic(), time.process_time()
    total, seen = 0, 0
    while time.monotonic() - begin < seconds:
        if not spool.step():
            time.sleep(0.0005)
        seen += 1
        if seen % 64 == 0:
            total += _consume(home / "segments", keep=_KEEP_BYTES)
    stop.set()
    spool.seal_and_wait()
    wall, used = time.monotonic() - begin, time.process_time() - used
    total += _consume(home / "segments", keep=0)
    queue.put((total / wall / 1e6, used / wall))
    spool.close()


def _consume(folder: Path, keep: int) -> int:
    """Deletes the oldest segments beyond ``keep`` bytes; returns their bytes."""
    sizes = [(path, path.stat().st_size) for path in sealed_segments(folder)]
    total, deleted = sum(size for _, size in sizes), 0
    for path, size in sizes:
        if total - deleted <= keep:
            break
        path.unlink()
        deleted += size
    return deleted


def _raw(folder: Path, seconds: float) -> float:
    """MB/s of files as large as a segment, written with O_DIRECT, then fdatasync."""
    home = folder / "raw-bench"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    size, buffer = SpoolSettings().segment_bytes, aligned(_WRITE_BYTES)
    buffer[:] = np.random.default_rng(0).integers(0, 256, _WRITE_BYTES, dtype=np.uint8)
    begin, files = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        descriptor = os.open(home / str(files), os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(descriptor, 0, size)
        for offset in range(0, size, _WRITE_BYTES):
            os.pwrite(descriptor, buffer.data, offset)
        os.fdatasync(descriptor)
        os.close(descriptor)
        files += 1
        if files > _KEEP_BYTES // size:
            (home / str(files - 1 - _KEEP_BYTES // size)).unlink()
    rate = files * size / (time.monotonic() - begin) / 1e6
    shutil.rmtree(home)
    return rate


def _begun(sample_id: str) -> SampleMeta:
    """As the server knows a request when it begins."""
    meta = plain_meta(_STREAM, sample_id, 0)
    return replace(meta, prompt_tokens=64, verify_rounds=0, accepted_drafts=0, finish_reason="")
