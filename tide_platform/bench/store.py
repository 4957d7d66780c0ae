"""Append, poll, open, write and shuffled read of the dataset as it grows, with upkeep running.

Commits are those of ingest (fragments, fenced commit, read back) with tiny samples of one tenant and day;
upkeep runs between them, as it does in ``tide ingest``. At each point the same things are timed: appends (the
median of 20), a poll by a handle that lags behind, an open of a fresh handle, and the live fragments counted.
The dataset for reads is another one, of samples of a megabyte.

The yardstick of growth is the same dataset at 100 commits; of writing and reading, plain files (or objects)
of the same bytes.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tide_platform.bench.object_storage import object_storage
from tide_platform.bench.report import Report, ratio_of_medians
from tide_platform.bench.samples import random_sample
from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings
from tide_platform.config.schema import Storage

if TYPE_CHECKING:
    from tide_platform.store.hidden_states import HiddenStates

_TINY = StreamMeta("bench", hidden_size=8, vocab_size=256, aux_layer_ids=(2, 4, 6), teacher_k=4)
_LARGE = replace(_TINY, hidden_size=576, vocab_size=49_152, teacher_k=64)
_APPENDS, _POLLS, _UPKEEP_EVERY = 20, 10, 50
_READ_SAMPLES, _READ_ROWS, _READ_BATCH = 96, 256, 8


def run(folder_or_uri: str, *, commits: Sequence[int]) -> Report:
    """Local below a folder and then on a SeaweedFS of its own, or on the ``s3://`` prefix that is given."""
    ratios: dict[str, float] = {}
    raw: dict[str, Any] = {}
    with ExitStack() as stack:
        places: dict[str, Storage] = {}
        if folder_or_uri.startswith("s3://"):
            places["s3"] = Storage(uri=folder_or_uri)
        else:
            folder = Path(folder_or_uri)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "objects").mkdir(parents=True)
            places["local"] = Storage(uri=str(folder / "store"))
            places["s3"] = stack.enter_context(object_storage(folder / "objects"))
        for name, storage in places.items():
            points = _grow(storage, commits)
            rates = _read_and_write(storage)
            raw[name] = {"growth": points, "mb_s": rates}
            ratios |= {f"{name}_{key}": value for key, value in _judge(points, rates).items()}
    notes = [
        "append_N, poll_N, open_N: at N commits over at 100; fragments_N over 500; reads of a poll over 3",
        "write, read: MB/s over those of plain files or objects of the same bytes, one at a time",
    ]
    return Report("store", ratios, {}, raw, notes)


def _grow(storage: Storage, commits: Sequence[int]) -> list[dict[str, Any]]:
    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.objects import ObjectStore
    from tide_platform.store.upkeep import Upkeep

    settings = Settings(storage=storage, deployment="bench-growth")
    # about as many versions as the default's quarter of an hour leaves at a commit in two seconds
    settings.maintain.keep_hours = 0.0025
    objects, store = ObjectStore(storage), open_store(settings)
    objects.ensure_bucket()
    store.ensure(_TINY)
    upkeep, reader = Upkeep(settings, store, objects), open_store(settings)
    reader.tip()
    points, snapshot, count = [], store.snapshot(), 0
    rng = np.random.default_rng(0)
    for target in commits:
        times: list[float] = []
        while count < target:
            sample = random_sample(_TINY, rng, f"s{count}", 4)
            began = time.perf_counter()
            fragments = store.write([sample])
            assert snapshot is not None
            try:
                snapshot = store.commit(fragments, [str(count)], snapshot)
            finally:
                times.append(time.perf_counter() - began)
            count += 1
            if count % _UPKEEP_EVERY == 0:
                upkeep.run(1.0)
                snapshot = store.snapshot()
        lag, reads = _polls(store, reader)
        opens = [_took(lambda: open_store(settings).tip()) for _ in range(_POLLS)]
        fragments = len(store.handle.require(fresh=True).get_fragments())
        points.append(
            {
                "commits": target,
                "append_ms": [1e3 * each for each in times[-_APPENDS:]],
                "poll_ms": lag,
                "poll_reads": reads,
                "open_ms": opens,
                "fragments": fragments,
                "upkeep": upkeep.counts.to_json(),
            }
        )
    upkeep.lease.release()
    return points


def _polls(store: "HiddenStates", reader: "HiddenStates") -> tuple[list[float], int]:
    """Milliseconds of polls by a handle that lags behind; reads of the dearest."""
    reader.tip()
    lagging = store.handle.require()
    lagging.io_stats_incremental()
    lagging.checkout_version(lagging.latest_version).count_rows()
    reads = lagging.io_stats_incremental().read_iops + 1  # the listing that finds the newest is not counted
    return [_took(reader.tip) for _ in range(_POLLS)], reads


def _read_and_write(storage: Storage) -> dict[str, list[float]]:
    """MB/s of large samples: written in one commit, read back shuffled, and as plain objects."""
    turns = [_turn(storage, turn) for turn in range(3)]
    return {name: [turn[name] for turn in turns] for name in turns[0]}


def _turn(storage: Storage, turn: int) -> dict[str, float]:
    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.objects import ObjectStore

    settings = Settings(storage=storage, deployment=f"bench-read-{turn}")
    objects, store, fresh = ObjectStore(storage), open_store(settings), open_store(settings)
    store.ensure(_LARGE)
    rng = np.random.default_rng(turn)
    samples = [random_sample(_LARGE, rng, f"s{n}", _READ_ROWS) for n in range(_READ_SAMPLES)]
    bodies = [b"".join(array.tobytes() for array in each.tensors.values()) for each in samples]
    keys = [f"bench-plain-{turn}/{number}" for number in range(len(bodies))]
    kilobytes = sum(map(len, bodies)) / 1e3  # over milliseconds: MB/s

    def plain_write() -> None:
        for key, body in zip(keys, bodies, strict=True):
            objects.put_bytes(key, body)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("write", lambda: store.append(samples, ["x"])),
        ("plain_write", plain_write),
    ]
    rates = {name: kilobytes / _took(call) for name, call in calls[:: 1 if turn % 2 else -1]}
    refs = store.refs()
    order = [refs[int(index)] for index in rng.permutation(len(refs))]
    calls = [
        ("read", lambda: list(fresh.load(order, batch=_READ_BATCH))),
        ("plain_read", lambda: [objects.get_bytes(key) for key in keys]),
    ]
    return rates | {name: kilobytes / _took(call) for name, call in calls[:: 1 if turn % 2 else -1]}


def _judge(points: list[dict[str, Any]], rates: dict[str, list[float]]) -> dict[str, float]:
    at_100 = next((point for point in points if point["commits"] >= 100), points[-1])
    found = {
        "write": ratio_of_medians(rates["write"], rates["plain_write"]),
        "read": ratio_of_medians(rates["read"], rates["plain_read"]),
        "poll_reads": max(point["poll_reads"] for point in points) / 3,
    }
    for point in points:
        n = point["commits"]
        found[f"fragments_{n}"] = point["fragments"] / 500
        for name in ("append", "poll", "open") if n > at_100["commits"] else ():
            found[f"{name}_{n}"] = statistics.median(point[f"{name}_ms"]) / statistics.median(
                at_100[f"{name}_ms"]
            )
    return found


def _took(call: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)
