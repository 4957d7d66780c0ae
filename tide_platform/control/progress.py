"""The trainer's steps, logged to the registry while it trains."""

import time
from typing import TYPE_CHECKING, Any

from tide_platform.registry.mlflow_registry import Point, RegistryUnavailable

if TYPE_CHECKING:
    from tide_platform.registry.mlflow_registry import DraftRegistry

EVERY_S = 3.0
_PLAIN = ("learning_rate", "tokens", "epoch", "samples", "wait_seconds", "compute_seconds")
_OF_SAMPLES = ("loss", "grad_norm")  # a step of which no sample was usable has none


class LiveMetrics:
    """Collects step records and logs them every few seconds.

    A registry that does not answer meanwhile stops nothing: the points wait, and only the end insists on
    them.
    """

    def __init__(self, registry: "DraftRegistry", run_id: str):
        self._registry, self._run_id = registry, run_id
        self._points: list[Point] = []
        self._logged_at = time.monotonic()

    def __enter__(self) -> "LiveMetrics":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()

    def on_step(self, record: dict[str, Any]) -> None:
        """One optimizer step's record (fields of ``training.progress.StepRecord``)."""
        values = {name: float(record[name]) for name in _PLAIN}
        values["tokens_per_second"] = record["tokens"] / max(record["seconds"], 1e-9)
        if record["samples"]:
            values |= {name: float(record[name]) for name in _OF_SAMPLES}
            for name in ("losses", "accuracy"):
                values |= {f"{name}.step_{j}": float(value) for j, value in enumerate(record[name], start=1)}
        self._points.append(Point(record["step"], values, time.time()))
        if time.monotonic() - self._logged_at >= EVERY_S:
            try:
                self._flush()
            except RegistryUnavailable:
                self._logged_at = time.monotonic()

    def _flush(self) -> None:
        self._registry.log_points(self._run_id, self._points)
        self._points = []
        self._logged_at = time.monotonic()
