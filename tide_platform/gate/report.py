"""What the gate found: one result a check, and all of them as one object. Pure: no torch."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "fail", "not run"]


@dataclass(frozen=True)
class Check:
    """One thing that was compared."""

    name: str  # files | rope | map | head | layers | norm | teacher | mask | logits | live | overfit
    on: str  # what was looked at: draft | capture | export | server
    status: Status
    message: str  # what was found; of a failure, the likely fault and the mend
    value: float | None = None  # what was measured, in the tolerance's unit
    tolerance: float | None = None  # the check fails beyond
    reason: str = ""  # of the tolerance
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        raw = asdict(self)
        if self.value is not None and not math.isfinite(self.value):
            raw["value"] = str(self.value)  # JSON has no infinity
        return raw


@dataclass(frozen=True)
class Tolerance:
    """How far apart two numbers may be, and why they may be that far apart."""

    limit: float
    reason: str


def judged(
    name: str,
    on: str,
    value: float,
    tolerance: Tolerance,
    good: str,
    fault: str,
    details: dict[str, Any] | None = None,
) -> Check:
    """A check of one number: passed where it is at most the tolerance (a NaN is not)."""
    passed = value <= tolerance.limit
    return Check(
        name,
        on,
        "pass" if passed else "fail",
        good if passed else fault,
        value,
        tolerance.limit,
        tolerance.reason,
        details or {},
    )


def passed(name: str, on: str, message: str, details: dict[str, Any] | None = None) -> Check:
    return Check(name, on, "pass", message, details=details or {})


def failed(name: str, on: str, message: str, details: dict[str, Any] | None = None) -> Check:
    return Check(name, on, "fail", message, details=details or {})


@dataclass(frozen=True)
class GateReport:
    """All checks of one run. A check that was not run is no pass."""

    draft: str  # folder
    draft_digest: str
    target: str
    target_digest: str
    reference: str  # transformers | engine
    k: int  # speculative steps
    seconds: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.status == "pass" for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.status == "fail")

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "checks": [check.to_json() for check in self.checks]}
