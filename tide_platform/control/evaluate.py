"""How good the served draft is on the reference set today: acceptance replay of the champion alone, with the
pieces that judge a challenger.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.champion import ensure_champion
from tide_platform.control.costs import usable_costs
from tide_platform.control.dataset import read_reference
from tide_platform.control.judge import NoSpeculation, measured, replayed, stored
from tide_platform.control.ledger import Ledger
from tide_platform.control.promotion import Measured
from tide_platform.evaluation.cost_model import speeds_of

PREFIX = "daily"  # of the metrics on the draft's MLflow run


@dataclass(frozen=True)
class Evaluation:
    """The champion on the reference samples that are kept for judging."""

    champion: str
    mlflow_run: str
    version: str  # of the registered model
    lance_version: int
    k: int  # served
    requests: int
    left_out: int  # samples that hold not enough to be replayed under their verify rule
    found: Measured
    speeds: dict[int, dict[int, float]] = field(default_factory=dict)  # batch size -> k -> over the target
    costs: str = ""  # where the coefficients of the speeds are from, or why there are none

    def metrics(self) -> dict[str, float]:
        """Flat figures: acceptance length as served and at every k, acceptance rates, predicted speeds."""
        figures: dict[str, float] = {"acceptance_length": self.found.acceptance_length}
        figures |= {f"acceptance_length.k{k}": of for k, of in enumerate(self.found.by_k, start=1)}
        figures |= {f"acceptance_rate.{i}": of for i, of in enumerate(self.found.by_position, start=1)}
        figures |= {
            f"predicted_speed.batch{batch}.k{k}": speed
            for batch, of_k in sorted(self.speeds.items())
            for k, speed in of_k.items()
            if k
        }
        return figures

    def to_json(self) -> dict[str, Any]:
        """For people: who was measured on what, and the figures."""
        names = ("champion", "lance_version", "k", "requests", "left_out", "costs")
        return {name: getattr(self, name) for name in names} | self.metrics()


def evaluate_champion(
    settings: Settings, ledger: Ledger, clock: Callable[[], float] = time.time
) -> Evaluation:
    """Replays the served draft; the figures are logged to the draft's MLflow run as ``daily.…``.

    Raises :class:`NoSpeculation`, :class:`NoReference`, and what the store, the servers, the replay and the
    registry raise.
    """
    import torch

    from tide_platform.draft.checkpoint import load_target_parts
    from tide_platform.registry.mlflow_registry import DraftRegistry, Point
    from tide_platform.serving.target import resolve_target

    if settings.serving.k == 0:
        raise NoSpeculation
    torch.set_num_threads(settings.training.threads)
    champion = ensure_champion(settings, ledger)
    reference = read_reference(settings)
    samples = stored(settings, reference.version, reference.judge, reference.others)
    target = load_target_parts(resolve_target(settings))
    found = measured(replayed(settings, champion.folder, target, samples.samples), settings.serving.k)
    model, costs = usable_costs(settings)
    evaluation = Evaluation(
        champion=champion.digest,
        mlflow_run=champion.version.run_id,
        version=champion.version.version,
        lance_version=reference.version,
        k=settings.serving.k,
        requests=len({sample.meta.request_id for sample in samples.samples}),
        left_out=samples.left_out,
        found=found,
        speeds={batch: speeds_of(found.by_k, of) for batch, of in model.by_batch.items()} if model else {},
        costs=costs,
    )
    now = clock()
    values = {f"{PREFIX}.{name}": value for name, value in evaluation.metrics().items()}
    # the step is the time, in minutes: MLflow draws the days one behind the other
    DraftRegistry(settings).log_points(champion.version.run_id, [Point(int(now // 60), values, now)])
    return evaluation
