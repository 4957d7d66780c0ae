"""The trainer's steps in the registry while it trains."""

from typing import Any

import pytest

from tide_platform.control.progress import LiveMetrics
from tide_platform.registry.mlflow_registry import Point, RegistryUnavailable
from tide_platform.training.progress import StepRecord


class FakeRegistry:
    def __init__(self) -> None:
        self.points: list[Point] = []
        self.down = False

    def log_points(self, run_id: str, points: list[Point]) -> None:
        if self.down:
            raise RegistryUnavailable("http://x", "metrics", "it is down")
        self.points += points


def record(step: int, **changes: Any) -> dict[str, Any]:
    made = StepRecord(step, 9, 0, 1.5, [1.0, 0.6], [0.2, 0.1], 1e-3, 0.7, 8, 100 * step, 4.0 * step, 0.5, 3.5)
    return {"event": "step", **made.to_json(), **changes}


def test_a_step_with_its_speed_and_where_its_time_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_platform.control.progress.EVERY_S", 0)
    registry = FakeRegistry()
    with LiveMetrics(registry, "run") as metrics:  # type: ignore[arg-type]
        metrics.on_step(record(1))
        assert [point.step for point in registry.points] == [1]  # while it trains
        registry.down = True
        metrics.on_step(record(2))
        registry.down = False
        # a step of which no sample was usable has no loss
        metrics.on_step(record(3, samples=0, loss=0.0, losses=[0.0, 0.0], accuracy=[0.0, 0.0]))
    assert [point.step for point in registry.points] == [1, 2, 3]
    first, last = registry.points[0].values, registry.points[-1].values
    assert (first["loss"], first["losses.step_2"], first["accuracy.step_1"]) == (1.5, 0.6, 0.2)
    assert (first["tokens_per_second"], first["wait_seconds"], first["compute_seconds"]) == (25.0, 0.5, 3.5)
    assert not {"loss", "grad_norm", "losses.step_1"} & set(last) and last["samples"] == 0
