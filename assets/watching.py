"""Looks after the served draft, for as long as it is served."""

import dagster as dg

from assets.mending import mend_deployment
from resources.cycle import Cycle
from resources.runs import MENDS_TAG, DagsterRuns


def watch_champion(interval_s: int) -> dg.SensorDefinition:
    """The sensor, every ``interval_s`` seconds."""

    @dg.sensor(
        name="watch_champion",
        job=mend_deployment,
        minimum_interval_seconds=interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Reads what the servers finished, finds falls of acceptance, switches capture, asks for "
        "mending.",
    )
    def _watch_champion(context: dg.SensorEvaluationContext, cycle: Cycle) -> dg.SensorResult | dg.SkipReason:
        runs = DagsterRuns(context.instance)
        look = cycle.look_after(runs)
        if not look.mend or look.mended_by:
            return dg.SkipReason(look.message)
        settings = cycle.settings()
        tags = {MENDS_TAG: settings.deployment, "tide/why": "; ".join(look.mend)[:500]}
        return dg.SensorResult(run_requests=[dg.RunRequest(tags=tags)])

    return _watch_champion
