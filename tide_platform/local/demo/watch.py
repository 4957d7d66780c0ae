"""Watches the loop do its work: the window in the ledger, the run in Dagster. Changes nothing."""

import time
from collections.abc import Callable, Iterable

from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State
from tide_platform.local.errors import StackError
from tide_platform.local.graphql import Dagster, Run

SENSOR = "enough_hidden_states"
SENSOR_TAG = "dagster/sensor_name"
_POLL_S = 1.0


class WindowLate(StackError):
    """No window came, or it did not end in time."""

    def __init__(self, seconds: float, seen: str, sensor: str):
        super().__init__(
            f"after {seconds:.0f} s {seen}; the sensor enough_hidden_states says: {sensor}; "
            "see the Dagster page and .tide/logs"
        )
        self.seen = seen


class Watcher:
    """Follows the windows of one deployment. ``show`` gets one line of status, again and again."""

    def __init__(self, settings: Settings, dagster: Dagster):
        self._settings, self._dagster = settings, dagster
        self._ledger = Ledger(settings.ledger.url)

    def close(self) -> None:
        self._ledger.close()

    def known(self) -> set[str]:
        """Names of the windows so far."""
        return {record.key.window for record in self._ledger.windows(self._settings.deployment)}

    def open_windows(self) -> list[WindowRecord]:
        """Windows that an earlier run of the stack has left unfinished."""
        return self._ledger.open(self._settings.deployment)

    def new_window(
        self, known: Iterable[str], timeout_s: float, show: Callable[[str], None]
    ) -> WindowRecord | None:
        """The first window not among ``known``, as soon as the sensor has cut it; None at the deadline."""
        known, deadline = set(known), time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for record in self._ledger.windows(self._settings.deployment):
                if record.key.window not in known:
                    return record
            show("waiting for the sensor to cut a window")
            time.sleep(_POLL_S)
        return None

    def until_final(
        self, window: WindowRecord, timeout_s: float, show: Callable[[str], None]
    ) -> WindowRecord:
        """Wait until the window is deployed, rejected or failed. Raises :class:`WindowLate`."""
        began = time.monotonic()
        while True:
            record = self._ledger.get(window.key)
            if record.state.final:
                return record
            waited = time.monotonic() - began
            if waited > timeout_s:
                raise WindowLate(waited, f"window {record.key.window} is {record.state}", self.sensor_word())
            show(self._line(record, waited))
            time.sleep(_POLL_S)

    def run_of(self, record: WindowRecord) -> Run | None:
        """The Dagster run that held the window last."""
        return next((run for run in self._dagster.runs() if run.run_id == record.run_id), None)

    def why_failed(self, record: WindowRecord) -> list[str]:
        """The ledger's reason and what Dagster logged."""
        lines = [record.reason] if record.reason else []
        return lines + (self._dagster.failures(record.run_id) if record.run_id else [])

    def verdict_of(self, record: WindowRecord) -> dict | None:
        """Evidence of the window's last verdict."""
        found = self._ledger.verdicts_of(record.key)
        return found[-1].evidence if found else None

    def runs_in_progress(self) -> int:
        return sum(run.in_progress for run in self._dagster.runs())

    def until_quiet(self, timeout_s: float, show: Callable[[str], None]) -> None:
        """Wait until no run is in progress: two cores can't train and measure. Raises :class:`WindowLate`."""
        deadline = time.monotonic() + timeout_s
        while self.runs_in_progress():
            if time.monotonic() > deadline:
                raise WindowLate(timeout_s, "a Dagster run is still in progress", self.sensor_word())
            show("waiting for the Dagster run to end")
            time.sleep(_POLL_S)

    def sensor_word(self) -> str:
        """What the newest tick of the sensor that cuts windows came to."""
        state = self._dagster.sensors().get(SENSOR)
        if state is None or not state["ticks"]:
            return "it has not ticked yet"
        tick = state["ticks"][0]
        error = f": {tick['error']['message'].strip()}" if tick.get("error") else ""
        return f"{state['status'].lower()}, last tick {tick['status'].lower()}{error}"

    def _line(self, record: WindowRecord, waited: float) -> str:
        doing = {
            State.OWED: "waiting for its Dagster run",
            State.RUNNING: "training",
            State.TRAINED: "validating: champion against challenger",
            State.GATED: "deploying",
        }.get(record.state, record.state.value)
        attempt = f", attempt {record.attempt}" if record.attempt > 1 else ""
        return f"window {record.key.window} ({record.samples} samples{attempt}): {doing}, {waited:.0f} s"
