"""Tells people what happened (`notify`)."""

import dagster as dg

from resources.cycle import Cycle
from resources.runs import DagsterRuns


def tell_what_happened(interval_s: int) -> dg.SensorDefinition:
    """The sensor, every ``interval_s`` seconds. No cursor: the ledger knows what was told."""

    @dg.sensor(
        name="tell_what_happened",
        minimum_interval_seconds=interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells of new rows of the audit, and of what stands as it should not.",
    )
    def _tell_what_happened(context: dg.SensorEvaluationContext, cycle: Cycle) -> dg.SkipReason:
        return dg.SkipReason(cycle.tell())

    return _tell_what_happened


def tell_of_failed_runs(interval_s: int) -> dg.SensorDefinition:
    """The sensor on runs of this code location that failed for good."""

    @dg.run_failure_sensor(
        name="tell_of_failed_runs",
        minimum_interval_seconds=interval_s,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Tells of failed runs that nobody tries again.",
    )
    def _tell_of_failed_runs(context: dg.RunFailureSensorContext, cycle: Cycle) -> None:
        why = DagsterRuns(context.instance).why(context.dagster_run.run_id)
        context.log.info(cycle.tell_of_run(context.dagster_run, why))

    return _tell_of_failed_runs
