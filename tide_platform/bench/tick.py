"""How long a tick of the sensor takes that cuts windows, with a long history behind it: the ledger with many
windows at their end, the dataset with many commits, upkeep running. What the orchestrator does around it is
not in it.

The yardstick is a second: a tick must never be late for the next one. Three kinds of tick are timed: nothing
landed, samples landed that make no window, and a window is cut.
"""

import itertools
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tide_platform.bench.report import Report
from tide_platform.bench.samples import random_sample
from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.reconcile import RunView, tick
from tide_platform.control.records import Cut
from tide_platform.control.states import WindowKey

WINDOWS, COMMITS, WINDOW, TICKS = 1000, 5000, 16, 10
LIMIT_S = 1.0
_TINY = StreamMeta("bench", hidden_size=8, vocab_size=256, aux_layer_ids=(2, 4, 6), teacher_k=4)
_UPKEEP_EVERY = 50


class NoRuns:
    """An orchestrator that knows of no run."""

    def of_attempt(self, key: WindowKey, attempt: int) -> RunView | None:
        return None

    def get(self, run_id: str) -> RunView | None:
        return None

    def end(self, run_id: str, message: str) -> None: ...

    def why(self, run_id: str) -> str:
        return ""


def run(folder: Path, *, windows: int = WINDOWS, commits: int = COMMITS) -> Report:
    """On a SQLite ledger and a local dataset below ``folder``, which is emptied before and after.

    ``ratios``: seconds of the median tick over :data:`LIMIT_S`, by kind.
    """
    import numpy as np

    from tide_platform.control.dataset import Dataset
    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.objects import ObjectStore
    from tide_platform.store.upkeep import Upkeep

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = Settings(state=folder, deployment="bench")
    settings.storage.uri = str(folder / "store")
    settings.window.min_samples, settings.window.policy = WINDOW, "all"
    settings.maintain.keep_hours = 0.01
    objects, store = ObjectStore(settings.storage), open_store(settings)
    objects.ensure_bucket()
    store.ensure(_TINY)
    rng, numbers = np.random.default_rng(0), itertools.count()
    upkeep = Upkeep(settings, store, objects)

    def land(samples: int) -> None:
        number = next(numbers)
        made = [random_sample(_TINY, rng, f"s{number}-{i}", 4) for i in range(samples)]
        store.append(made, [str(number)])

    for number in range(commits):
        land(1)
        if number % _UPKEEP_EVERY == 0:
            upkeep.run(1.0)
    upkeep.lease.release()
    ledger = Ledger(f"sqlite:///{folder}/ledger.db")
    try:
        _history(ledger, settings, windows, store.tip().rows, store.tip().version)
        dataset = Dataset(settings)
        raw: dict[str, list[float]] = {"idle": [], "landed": [], "cut": []}
        for _ in range(TICKS):
            for kind, samples in (("idle", 0), ("landed", 1), ("cut", WINDOW)):
                if samples:
                    land(samples)
                began = time.perf_counter()
                found = tick(settings, ledger, dataset, NoRuns())
                raw[kind].append(time.perf_counter() - began)
                for record in found.cut:
                    ledger.release(record, "of the benchmark", 1)
    finally:
        ledger.close()
        shutil.rmtree(folder, ignore_errors=True)
    ratios = {kind: statistics.median(seconds) / LIMIT_S for kind, seconds in raw.items()}
    size: dict[str, Any] = {"windows": windows, "commits": commits}
    told = f"seconds of a tick over {LIMIT_S:g}, with {windows} windows and {commits} commits"
    notes = [f"idle, landed, cut: {told}"]
    return Report("tick", ratios, {}, {"seconds": raw, **size}, notes)


def _history(ledger: Ledger, settings: Settings, windows: int, rows: int, version: int) -> None:
    """So many windows that have failed, over the rows that there are."""
    bounds = [rows * number // windows - 1 for number in range(windows + 1)]
    cuts = [Cut(a, b, version, max(0, b - a), 4 * max(0, b - a)) for a, b in itertools.pairwise(bounds)]
    before = ledger.scan(settings.deployment)
    after = replace(before, version=version, rows=rows, last_row=bounds[-1], pending=0)
    ledger.cut(settings.deployment, before, after, cuts)
    for record in ledger.open(settings.deployment):
        ledger.release(record, "of the benchmark", 1)
