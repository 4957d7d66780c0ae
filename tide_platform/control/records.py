"""What the ledger holds of a window, and what it refuses."""

from dataclasses import dataclass
from typing import Any

from tide_platform.config import TideError
from tide_platform.control.states import State, WindowKey


class LedgerError(TideError):
    """What the ledger refuses; ``key`` is the window."""

    def __init__(self, key: WindowKey, text: str):
        super().__init__(f"window {key}: {text}")
        self.key = key


class UnknownWindow(LedgerError):
    def __init__(self, key: WindowKey):
        super().__init__(key, "not in the ledger; the sensor enough_hidden_states cuts windows")


class OtherDeployment(LedgerError):
    """The code location of one deployment was asked to work on another's window."""

    def __init__(self, key: WindowKey, own: str):
        super().__init__(
            key,
            f"this code location works for deployment {own}; start the run from the job adapt_draft of the "
            f"code location of {key.deployment}",
        )
        self.own = own


class WindowHeld(LedgerError):
    def __init__(self, key: WindowKey, other: WindowKey, holder: str):
        super().__init__(
            key,
            f"run {holder} works on {other}; one window of a deployment runs at a time: wait or cancel it",
        )
        self.other, self.holder = other, holder


class StaleRun(LedgerError):
    def __init__(self, key: WindowKey, run_id: str, detail: str):
        super().__init__(
            key, f"run {run_id} does not hold it any more ({detail}); a later attempt goes on with it"
        )
        self.run_id = run_id


class WindowClosed(LedgerError):
    def __init__(self, key: WindowKey, state: State):
        super().__init__(key, f"it is {state}, which is final; nothing is left to do")
        self.state = state


@dataclass(frozen=True)
class Scan:
    """How far the dataset was cut into windows; fields as in ``tables.scans``."""

    version: int = 0
    rows: int = 0
    last_row: int = -1
    pending: int = 0


@dataclass(frozen=True)
class Cut:
    """A new window: its samples are the rows with ``after_row < row id <= last_row`` that are not
    reference.
    """

    after_row: int
    last_row: int
    lance_version: int
    samples: int
    tokens: int
    rule: dict[str, Any] | None = None  # why it was cut, see tide_platform.control.windows


@dataclass(frozen=True)
class WindowRecord:
    """One row of the ledger; fields as in ``tables.windows``."""

    key: WindowKey
    state: State
    attempt: int
    holder: str | None
    seen_at: float | None
    run_id: str | None
    after_row: int
    last_row: int
    lance_version: int
    samples: int
    tokens: int
    parent: str | None
    challenger: str | None
    mlflow_run: str | None
    reason: str | None
    created_at: float
    updated_at: float
    rule: dict[str, Any] | None
    taken_by: str | None


@dataclass(frozen=True)
class VerdictRecord:
    passed: bool
    champion: str
    challenger: str
    evidence: dict[str, Any]
    judged_at: float
