"""The trainer's steps, logged to the registry while it trains."""

import time
from typing import TYPE_CHECKING, Any

from tide_platform.registry.mlflow_registry import Point, RegistryUnavailable

if TYPE_CHECKING:
    from tide_platform.registry.mlflow_registry import DraftRegistry

EVERY_S = 3.0
_PLAIN = ("loss", "learning_rate", "grad_norm", "tokens", "epoch")


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
        """One optimizer step's record (fields of ``training.trainer.StepRecord``)."""
        values = {name: float(record[name]) for name in _PLAIN}
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
