"""What a benchmark found, as one JSON object, and the statistics that all of them share."""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RESAMPLES = 4000
CONFIDENCE = 0.95
_PACKAGES = {"torch": "torch", "lance": "pylance", "boto3": "boto3", "numpy": "numpy"}


def conditions() -> dict[str, Any]:
    """Where and when this was measured. ``load_average``: of the last minute, when this is called."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "threads": os.environ.get("OMP_NUM_THREADS"),  # of this process; the server's are in `raw`
        "load_average": {"end": round(os.getloadavg()[0], 2)},
        "versions": {"python": platform.python_version(), "sglang": _sglang()}
        | {name: _version(package) for name, package in _PACKAGES.items()},
    }


@dataclass
class Report:
    """One run of a benchmark.

    ``ratios``: case -> the number that is judged; ``intervals``: case -> its 95 % interval, where it is a
    small effect; ``raw``: every single measurement; ``notes``: what a reader must know of them.
    """

    bench: str
    ratios: dict[str, float]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=conditions)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), default=_plain)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n")


def ratio_of_medians(case: Sequence[float], yardstick: Sequence[float]) -> float:
    """Median of ``case`` over median of ``yardstick``, where the two were not measured in pairs."""
    return float(np.median(case) / np.median(yardstick))


def paired_ratio(case: Sequence[float], yardstick: Sequence[float]) -> float:
    """Median of ``case[i] / yardstick[i]``. What both of a pair share, their input and the machine's state at
    the time, cancels; a disturbed pair is one of many.
    """
    return float(np.median(np.asarray(case, float) / np.asarray(yardstick, float)))


def paired_interval(
    case: Sequence[float], yardstick: Sequence[float], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """Two-sided interval of :func:`paired_ratio`: percentile bootstrap over the pairs (Efron & Tibshirani
    1993, chapter 13).

    Raises ``ValueError`` where there are fewer than two pairs.
    """
    from scipy.stats import bootstrap

    found = bootstrap(
        (np.asarray(case, float) / np.asarray(yardstick, float),),
        np.median,
        vectorized=True,
        method="percentile",
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(found.low), float(found.high)


def alternation(pairs: int) -> list[bool]:
    """ABBA order of ``2 * pairs`` blocks (True: the case, False: the yardstick): a steady drift of the
    machine weighs on both alike.
    """
    return [case for pair in range(pairs) for case in ((True, False) if pair % 2 == 0 else (False, True))]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} in a report")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sglang() -> str | None:
    """Version in the serving environment; None where there is none."""
    from tide_platform.config import Settings
    from tide_platform.engine.support import ADAPTERS
    from tide_platform.serving.interpreter import InterpreterUnusable, find_python, probe_interpreter

    try:
        return probe_interpreter(find_python(Settings()), list(ADAPTERS)).sglang
    except InterpreterUnusable:
        return None
