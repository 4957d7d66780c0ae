"""Whether live acceptance has fallen: against what it was when the draft was promoted, which sees a slow
drift, and against its own recent past (Page-Hinkley's test, Page 1954), which sees a sudden one. Of the whole
traffic and of each tenant: one that falls among many does not move the mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tide_platform.config import Settings
from tide_platform.control.memory import Memory, Request, acceptance, by_tenant
from tide_platform.control.watch import rounds_a_token
from tide_platform.evaluation.sequence import mean_bounds

ALL = "all"  # the slice of the whole traffic
TOLERATED = 0.02  # rounds a token: a rise that Page-Hinkley's test lets pass
FALSE_ALARM = 10_000  # requests between two false alarms, on the mean


@dataclass(frozen=True)
class Drift:
    """A slice whose acceptance length fell. ``how``: reference | recent."""

    slice: str
    how: str
    before: float
    now: float
    requests: int  # that `now` is of
    at: float  # Unix time, seconds, of the request at which it was seen

    def __str__(self) -> str:
        past = "at promotion" if self.how == "reference" else "before"
        return (
            f"{self.slice}: acceptance length {self.now:.3f} over the last {self.requests} requests, "
            f"{self.before:.3f} {past}"
        )


def drifts(settings: Settings, memory: Memory) -> list[Drift]:
    """Slices that have fallen, the whole first. A slice with fewer than ``watch.slice_requests`` newest
    requests is not looked at; one that had fewer among the first is compared with the whole's. One whose
    fall is known is not told of again before it has recovered.
    """
    least = settings.watch.slice_requests
    first, newest = by_tenant(memory.first), by_tenant(memory.newest)
    slices = {ALL: memory.newest} | (newest if len(newest) > 1 else {})
    found = []
    for name, now in slices.items():
        own = memory.first if name == ALL else first.get(name, [])
        reference = own if len(own) >= least else memory.first
        if name in memory.drifted or len(now) < least or len(reference) < least:
            continue
        past = [*own, *now]
        drift = _from_reference(settings, name, reference, now) or _from_past(
            name, past, least, memory.recovered.get(name, 0.0)
        )
        if drift is not None:
            found.append(drift)
    return found


def has_recovered(memory: Memory, drift: Mapping[str, Any], least: int) -> bool:
    """Whether a slice's newest ``least`` requests are half way back, or more."""
    of = memory.newest if drift["slice"] == ALL else by_tenant(memory.newest).get(drift["slice"], [])
    now = acceptance(of[-least:])
    return len(of) >= least and now is not None and now >= (drift["before"] + drift["now"]) / 2


def lower_bound(requests: Sequence[Request], k: int, confidence: float) -> float:
    """Of the acceptance length, each request weighing alike; holds however often one looks."""
    return 1 / _bounds(requests, k, confidence)[1]


def upper_bound(requests: Sequence[Request], k: int, confidence: float) -> float:
    return 1 / _bounds(requests, k, confidence)[0]


def _from_reference(
    settings: Settings, name: str, reference: Sequence[Request], now: Sequence[Request]
) -> Drift | None:
    of, k = settings.watch, settings.serving.k
    share = 1 - (1 - of.confidence) / 2
    if upper_bound(now, k, share) >= lower_bound(reference, k, share) * (1 - of.max_loss):
        return None
    return _drift(name, "reference", reference, now)


def _from_past(name: str, requests: Sequence[Request], least: int, since: float) -> Drift | None:
    """The test over rounds a token, each request weighing alike; only a fall behind ``since`` counts.

    Its threshold follows the requests' own spread: sums of steps that drift down by d = TOLERATED / 2 reach
    h by chance once in about ``exp(2 d h / variance)`` requests (Siegmund 1985, II.6).
    """
    from river.drift import PageHinkley

    rounds = rounds_a_token(requests)
    variance = max(float(np.var(rounds[:least])), 1e-4)
    threshold = math.log(FALSE_ALARM) * variance / TOLERATED
    test = PageHinkley(min_instances=least, delta=TOLERATED / 2, threshold=threshold, alpha=1.0, mode="up")
    fell = None
    for index, value in enumerate(rounds, start=1):
        test.update(float(value))
        if test.drift_detected and requests[index - 1]["at"] > since:
            fell = index
    if fell is None:
        return None
    start = max(1, fell - least // 2)
    return _drift(name, "recent", requests[:start], requests[start:])


def _drift(name: str, how: str, before: Sequence[Request], now: Sequence[Request]) -> Drift | None:
    was, length = acceptance(before), acceptance(now)
    if was is None or length is None or length >= was:
        return None
    return Drift(name, how, was, length, len(now), now[-1]["at"])


def _bounds(requests: Sequence[Request], k: int, confidence: float) -> tuple[float, float]:
    return mean_bounds(rounds_a_token(requests), 1 / (k + 1), 1.0, confidence)
