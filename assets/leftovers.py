"""Removes training pods that a killed run left behind, also where its window is not trained again."""

import dagster as dg

from resources.runs import DagsterRuns
from resources.trainer_pods import remove_pods_left_behind
from tide_platform.config import Settings, TideError

INTERVAL_S = 300


def pods_left_behind(settings: Settings) -> list[dg.SensorDefinition]:
    """The sensor; none where no pods train."""
    if settings.cluster is None or settings.cluster.trainer is None:
        return []

    @dg.sensor(
        name="pods_left_behind",
        minimum_interval_seconds=INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Removes training pods whose run is over.",
    )
    def _pods_left_behind(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        said: list[str] = []
        try:
            remove_pods_left_behind(settings, DagsterRuns(context.instance), said.append)
        except TideError as error:
            return dg.SkipReason(str(error))
        return dg.SkipReason("; ".join(said) or "no pod is without its run")

    return [_pods_left_behind]
