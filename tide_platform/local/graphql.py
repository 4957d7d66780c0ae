"""What the stack and the demo ask Dagster, over its webserver's GraphQL."""

from dataclasses import dataclass, field
from typing import Any

from tide_platform.local.errors import StackError

_WORKSPACE = """{ workspaceOrError { ... on Workspace { locationEntries { name loadStatus
  locationOrLoadError { __typename ... on PythonError { message } } } } } }"""
_RELOAD = "mutation { reloadWorkspace { __typename } }"
_DAEMONS = "{ instance { daemonHealth { allDaemonStatuses { daemonType healthy required } } } }"
_RUNS = """query Runs($limit: Int!) { runsOrError(limit: $limit) { ... on Runs { results {
  runId status creationTime startTime endTime tags { key value } } } } }"""
_SENSORS = """{ sensorsOrError(
  repositorySelector: {repositoryName: "__repository__", repositoryLocationName: "tide"}) {
  ... on Sensors { results { name sensorState { status
    ticks(limit: 1) { status timestamp error { message } } } } }
  ... on PythonError { message } } }"""
_FAILURES = """query Failures($id: ID!) { logsForRun(runId: $id) {
  ... on EventConnection { events { __typename
  ... on ExecutionStepFailureEvent { stepKey error { message causes { message } } }
  ... on RunFailureEvent { message error { message } } } } } }"""
IN_PROGRESS = ("QUEUED", "NOT_STARTED", "MANAGED", "STARTING", "STARTED", "CANCELING")


@dataclass(frozen=True)
class Run:
    """A Dagster run as the webserver tells it; times are Unix seconds."""

    run_id: str
    status: str
    created: float
    started: float | None
    ended: float | None
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def in_progress(self) -> bool:
        return self.status in IN_PROGRESS


class Dagster:
    """GraphQL client of one webserver."""

    def __init__(self, url: str):
        self.url = url

    def locations(self) -> list[dict[str, Any]]:
        return self._ask(_WORKSPACE)["workspaceOrError"].get("locationEntries", [])

    def reload_locations(self) -> None:
        """Let the webserver load the definitions again: what it could not reach once stays an error."""
        self._ask(_RELOAD)

    def daemons_healthy(self) -> bool:
        """Whether every daemon that this instance needs has sent a heartbeat."""
        statuses = self._ask(_DAEMONS)["instance"]["daemonHealth"]["allDaemonStatuses"]
        return all(status["healthy"] for status in statuses if status["required"])

    def runs(self, limit: int = 20) -> list[Run]:
        """The newest runs, newest first."""
        results = self._ask(_RUNS, limit=limit)["runsOrError"].get("results", [])
        return [
            Run(
                run["runId"],
                run["status"],
                run["creationTime"],
                run["startTime"],
                run["endTime"],
                {tag["key"]: tag["value"] for tag in run["tags"]},
            )
            for run in results
        ]

    def sensors(self) -> dict[str, dict[str, Any]]:
        """Name of each sensor -> its state: ``status`` and the newest of ``ticks``."""
        results = self._ask(_SENSORS)["sensorsOrError"].get("results", [])
        return {sensor["name"]: sensor["sensorState"] for sensor in results}

    def failures(self, run_id: str) -> list[str]:
        """Why a run failed: one line for each failed step, root cause first."""
        lines = []
        for event in self._ask(_FAILURES, id=run_id)["logsForRun"].get("events", []):
            error = event.get("error")
            if event["__typename"] in ("ExecutionStepFailureEvent", "RunFailureEvent") and error:
                causes = [cause["message"].strip() for cause in error.get("causes") or []]
                lines.append(f"{event.get('stepKey', 'run')}: {(causes or [error['message'].strip()])[-1]}")
        return lines

    def _ask(self, query: str, **variables: Any) -> dict[str, Any]:
        import httpx

        reply = httpx.post(f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=30)
        reply.raise_for_status()
        body = reply.json()
        if body.get("errors"):
            raise StackError(f"Dagster refused a GraphQL query: {body['errors'][0]['message']}")
        return body["data"]
