"""Starts a run when enough samples landed, and sees to it that no window is lost."""

import dagster as dg

from assets.capture import hidden_states
from assets.jobs import adapt_draft
from assets.partitions import WINDOWS, windows
from resources.cycle import Cycle
from resources.runs import DagsterRuns, attempt_tags
from tide_platform.control.records import WindowRecord


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
        known = context.instance.get_dynamic_partitions(WINDOWS) if tick.cut else []
        events: list[dg.AssetObservation | dg.AssetMaterialization] = [
            _folded(cycle, record) for record in tick.folded
        ]
        shown = [str(record.key) for record in tick.folded]
        requests = []
        if tick.request is not None:
            key = str(tick.request.key)
            shown.append(key)
            metadata = cycle.window_metadata(tick.request)
            events.append(dg.AssetMaterialization(hidden_states.key, partition=key, metadata=metadata))
            run_key = f"{key}/{tick.request.attempt}"
            requests.append(
                dg.RunRequest(run_key=run_key, partition_key=key, tags=attempt_tags(tick.request))
            )
        return dg.SensorResult(
            run_requests=requests or None,
            skip_reason=None if requests else tick.message,
            dynamic_partitions_requests=[
                *([windows.build_add_request(shown)] if shown else []),
                *([windows.build_delete_request(retired)] if (retired := cycle.retired(known)) else []),
            ],
            asset_events=events,
        )

    return _enough_hidden_states


def _folded(cycle: Cycle, record: WindowRecord) -> dg.AssetObservation:
    """A window that another took: nothing runs for it, the asset's page says why."""
    metadata = {"state": record.state.value, "reason": record.reason, "window": record.taken_by}
    return dg.AssetObservation(
        hidden_states.key,
        partition=str(record.key),
        metadata=metadata | cycle.window_metadata(record),
        description=record.reason,
    )
