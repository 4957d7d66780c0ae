"""Is the draft that is served now worse than the one before it? From finished live requests, by tests that
may be looked at after every one of them. Pure.

Compared are requests that one draft served whole. Each has the rounds that it took a token: its mean is what
acceptance is about, every request weighing alike. What is tested (each with its share of the error that
``confidence`` leaves, and half of that for either side):

* rounds a token, against the champion's by more than ``max_loss``;
* the share of requests whose tokens took longer than the champion's median, or its 99th percentile, stretched
  by ``max_slowdown``: a half and a hundredth of them where nothing changed;
* the share of requests that were aborted, against the champion's by more than ``max_aborts``.

The champion's requests are of the other servers at the same time where there are some, else those that the
same server finished before the reload; then a change of the traffic at just that time can look like one of
the draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tide_platform.evaluation.sequence import mean_bounds

TESTS = 4
_TAIL = 0.01  # of the 99th percentile
_TAIL_SLACK = 0.04  # more than that many further slow requests is worse: a tail of few requests is not known


@dataclass(frozen=True)
class Limits:
    """What is still as good (``rollout.*``)."""

    k: int  # most draft tokens of a round
    confidence: float
    max_loss: float  # of acceptance length
    max_slowdown: float  # of the time a token
    max_aborts: float  # further share of requests


@dataclass(frozen=True)
class Live:
    """Requests of one draft. ``token_ms``: of a token behind a request's first."""

    requests: int
    rounds: int
    accepted: int
    aborted: int
    token_ms_p50: float | None
    token_ms_p99: float | None

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"acceptance_length": self.acceptance_length}


@dataclass(frozen=True)
class Finding:
    """``worse`` names what fell, with its bounds; empty where nothing is shown."""

    champion: Live
    challenger: Live
    worse: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "champion": self.champion.to_json(),
            "challenger": self.challenger.to_json(),
            "worse": self.worse,
        }


def compare_live(
    champion: Sequence[Mapping[str, Any]], challenger: Sequence[Mapping[str, Any]], limits: Limits
) -> Finding:
    """``champion``, ``challenger``: finished requests as ``/tide/requests`` tells of them, whole ones of
    either draft.
    """
    found = Finding(summarize(champion), summarize(challenger))
    share = 1 - (1 - limits.confidence) / (2 * TESTS)  # confidence of each one-sided bound
    least = 1 / (limits.k + 1)

    _, before = mean_bounds(_rounds_a_token(champion), least, 1.0, share)
    now, _ = mean_bounds(_rounds_a_token(challenger), least, 1.0, share)
    if now * (1 - limits.max_loss) > before:
        found.worse.append(
            f"acceptance length is at most {1 / now:.3f}, the champion's at least {1 / before:.3f}"
        )
    times, new = _token_ms(champion), _token_ms(challenger)
    if len(times):
        for name, at, slack in (("median", 0.5, 0.0), ("99th percentile", _TAIL, _TAIL_SLACK)):
            bound = float(np.quantile(times, 1 - at)) * (1 + limits.max_slowdown)
            slow, _ = mean_bounds((new > bound).astype(float), 0.0, 1.0, share)
            if slow > at + slack:
                found.worse.append(
                    f"at least {slow:.0%} of requests take over {bound:.1f} ms a token, the champion's "
                    f"{name} and {limits.max_slowdown:.0%}"
                )
    _, aborts = mean_bounds(_aborted(champion), 0.0, 1.0, share)
    more, _ = mean_bounds(_aborted(challenger), 0.0, 1.0, share)
    if more > aborts + limits.max_aborts:
        found.worse.append(
            f"at least {more:.0%} of requests are aborted, the champion's at most {aborts:.0%}"
        )
    return found


def summarize(requests: Sequence[Mapping[str, Any]]) -> Live:
    times = _token_ms(requests)
    p50, p99 = (float(np.quantile(times, q)) if len(times) else None for q in (0.5, 0.99))
    return Live(
        requests=len(requests),
        rounds=sum(one["rounds"] for one in requests),
        accepted=sum(one["accepted"] for one in requests),
        aborted=sum(one["reason"] == "abort" for one in requests),
        token_ms_p50=p50,
        token_ms_p99=p99,
    )


def whole(requests: Sequence[Mapping[str, Any]], draft: str) -> list[Mapping[str, Any]]:
    """Those that ``draft`` served from beginning to end."""
    return [one for one in requests if one["draft"] == draft and not one["straddles"]]


def _rounds_a_token(requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Of requests with a round: between 1 / (k + 1) and 1."""
    pairs = ((one["rounds"], one["accepted"]) for one in requests if one["rounds"])
    return np.array([rounds / (rounds + accepted) for rounds, accepted in pairs], float)


def _token_ms(requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([one["token_ms"] for one in requests if one["token_ms"] is not None], float)


def _aborted(requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([one["reason"] == "abort" for one in requests], float)
