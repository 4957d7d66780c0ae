"""Dagster's runs as the ledger's reconciliation sees them."""

import dagster as dg

from tide_platform.control.reconcile import RunView
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import WindowKey

WINDOW_TAG, ATTEMPT_TAG, VERSION_TAG, SAMPLES_TAG = (
    "tide/window",
    "tide/attempt",
    "tide/lance_version",
    "tide/samples",
)
VERDICT_TAG = "tide/verdict"  # passed | rejected, on a run that has judged

MENDS_TAG = "tide/mends"  # a run that mends this deployment

_STATUS = {
    dg.DagsterRunStatus.QUEUED: "queued",
    dg.DagsterRunStatus.NOT_STARTED: "starting",
    dg.DagsterRunStatus.MANAGED: "starting",
    dg.DagsterRunStatus.STARTING: "starting",
    dg.DagsterRunStatus.STARTED: "started",
    dg.DagsterRunStatus.CANCELING: "started",
    dg.DagsterRunStatus.SUCCESS: "success",
    dg.DagsterRunStatus.FAILURE: "failure",
    dg.DagsterRunStatus.CANCELED: "canceled",
}


def attempt_tags(record: WindowRecord) -> dict[str, str]:
    """Tags of the run for a window's current attempt."""
    return {
        WINDOW_TAG: str(record.key),
        ATTEMPT_TAG: str(record.attempt),
        VERSION_TAG: str(record.lance_version),
        SAMPLES_TAG: str(record.samples),
    }


def attempt_of(run: dg.DagsterRun) -> int | None:
    """The attempt that the sensor asked for; None for a run started, or executed again, by hand."""
    if run.parent_run_id is not None or ATTEMPT_TAG not in run.tags:
        return None
    return int(run.tags[ATTEMPT_TAG])


class DagsterRuns:
    """Implements :class:`tide_platform.control.reconcile.Runs` on a Dagster instance."""

    def __init__(self, instance: dg.DagsterInstance):
        self._instance = instance

    def of_attempt(self, key: WindowKey, attempt: int) -> RunView | None:
        return self._newest(dg.RunsFilter(tags={WINDOW_TAG: str(key), ATTEMPT_TAG: str(attempt)}))

    def get(self, run_id: str) -> RunView | None:
        return self._newest(dg.RunsFilter(run_ids=[run_id]))

    def end(self, run_id: str, message: str) -> None:
        run = self._instance.get_run_by_id(run_id)
        if run is not None and not run.is_finished:
            self._instance.report_run_failed(run, message)

    def why(self, run_id: str) -> str:
        """The error of the step that failed, else the run's own failure message; its first line."""
        for kind in (dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE):
            records = self._instance.get_records_for_run(run_id, of_type=kind, limit=1).records
            if records and (event := records[0].event_log_entry.dagster_event):
                error = event.step_failure_data.error if kind is dg.DagsterEventType.STEP_FAILURE else None
                text = (error.cause or error).message if error else event.message
                return f"{event.step_key}: {_first_line(text)}" if event.step_key else _first_line(text)
        return "no reason recorded"

    def mending(self, deployment: str) -> RunView | None:
        """The newest run that was asked for to mend the deployment."""
        return self._newest(dg.RunsFilter(tags={MENDS_TAG: deployment}))

    def _newest(self, filters: dg.RunsFilter) -> RunView | None:
        records = self._instance.get_run_records(filters, limit=1)
        if not records:
            return None
        run = records[0].dagster_run
        return RunView(run.run_id, _STATUS[run.status], records[0].update_timestamp.timestamp())


def _first_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[0][:300] if lines else "no reason recorded"
