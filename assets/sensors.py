"""Starts a run when enough samples landed, and sees to it that no window is lost."""

import dagster as dg

from assets.capture import hidden_states
from assets.jobs import adapt_draft
from assets.partitions import windows
from resources.cycle import Cycle
from resources.runs import DagsterRuns, attempt_tags


def enough_hidden_states(interval_s: int) -> dg.SensorDefinition:
    """The sensor, every ``interval_s`` seconds. No cursor: the ledger knows what is owed."""

    @dg.sensor(
        name="enough_hidden_states",
        job=adapt_draft,
        minimum_interval_seconds=interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Cuts windows, settles runs that ended or died, asks for the attempt that is owed.",
    )
    def _enough_hidden_states(context: dg.SensorEvaluationContext, cycle: Cycle) -> dg.SensorResult:
        tick = cycle.tick(DagsterRuns(context.instance))
        if tick.request is None:
            return dg.SensorResult(skip_reason=tick.message)
        key, attempt = str(tick.request.key), tick.request.attempt
        return dg.SensorResult(
            dynamic_partitions_requests=[windows.build_add_request([key])],
            asset_events=[
                dg.AssetMaterialization(
                    hidden_states.key, partition=key, metadata=cycle.window_metadata(tick.request)
                )
            ],
            run_requests=[
                dg.RunRequest(run_key=f"{key}/{attempt}", partition_key=key, tags=attempt_tags(tick.request))
            ],
        )

    return _enough_hidden_states
