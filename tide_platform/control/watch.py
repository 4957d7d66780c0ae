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
same server finished before the reload. Like is compared with like: the champion's newest requests, with the
same mix of tenants as the challenger's (for times, of tenants and of numbers of requests at a time); a tenant
that only one of them served says nothing. What is left: a change of one tenant's traffic at just the time of
the reload can look like one of the draft.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from tide_platform.control.history import batch_of
from tide_platform.evaluation.sequence import mean_bounds
from tide_platform.serving.report import acceptance_length

K = TypeVar("K", bound=Hashable)
TESTS = 4
MOST = 8  # of the champion's requests beside one of the challenger's
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
        return acceptance_length(self.rounds, self.accepted)

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
    share = _share(limits)
    before, now = matched(champion, challenger, _tenant)
    found = Finding(summarize(before), summarize(now))
    if (fell := _fell(before, now, limits)) is not None:
        found.worse.append(fell)
    times, new = (_token_ms(of) for of in matched(champion, challenger, _tenant_and_load))
    if len(times):
        for name, at, slack in (("median", 0.5, 0.0), ("99th percentile", _TAIL, _TAIL_SLACK)):
            bound = float(np.quantile(times, 1 - at)) * (1 + limits.max_slowdown)
            slow, _ = mean_bounds((new > bound).astype(float), 0.0, 1.0, share)
            if slow > at + slack:
                found.worse.append(
                    f"at least {slow:.0%} of requests take over {bound:.1f} ms a token, the champion's "
                    f"{name} and {limits.max_slowdown:.0%}"
                )
    _, aborts = mean_bounds(_aborted(before), 0.0, 1.0, share)
    more, _ = mean_bounds(_aborted(now), 0.0, 1.0, share)
    if more > aborts + limits.max_aborts:
        found.worse.append(
            f"at least {more:.0%} of requests are aborted, the champion's at most {aborts:.0%}"
        )
    return found


def matched(
    champion: Sequence[Mapping[str, Any]],
    challenger: Sequence[Mapping[str, Any]],
    kind: Callable[[Mapping[str, Any]], Hashable],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Requests of both, oldest first as they are given, with the same mix of kinds: the champion's newest, up
    to :data:`MOST` for each of the challenger's. Chosen by kind and time alone, never by what they show.
    """
    ours, theirs = by_kind(challenger, kind), by_kind(champion, kind)
    counts = {each: min(len(of), len(theirs[each])) for each, of in ours.items() if each in theirs}
    if not counts:
        return [], []
    times = min(MOST, *(len(theirs[each]) // count for each, count in counts.items()))
    before = [one for each, count in counts.items() for one in theirs[each][-times * count :]]
    return before, [one for each, count in counts.items() for one in ours[each][:count]]


def acceptance_fell(
    champion: Sequence[Mapping[str, Any]], challenger: Sequence[Mapping[str, Any]], limits: Limits
) -> str | None:
    """In words; None where it is not shown. Like is compared with like."""
    return _fell(*matched(champion, challenger, _tenant), limits)


def _fell(
    champion: Sequence[Mapping[str, Any]], challenger: Sequence[Mapping[str, Any]], limits: Limits
) -> str | None:
    share, least = _share(limits), 1 / (limits.k + 1)
    _, before = mean_bounds(rounds_a_token(champion), least, 1.0, share)
    now, _ = mean_bounds(rounds_a_token(challenger), least, 1.0, share)
    if now * (1 - limits.max_loss) <= before:
        return None
    return f"acceptance length is at most {1 / now:.3f}, the champion's at least {1 / before:.3f}"


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


def _tenant(one: Mapping[str, Any]) -> Hashable:
    return one["tenant"]


def _tenant_and_load(one: Mapping[str, Any]) -> Hashable:
    return one["tenant"], batch_of(one["concurrency"])


def by_kind(
    requests: Iterable[Mapping[str, Any]], kind: Callable[[Mapping[str, Any]], K]
) -> dict[K, list[Mapping[str, Any]]]:
    """In the order of the requests."""
    found: dict[K, list[Mapping[str, Any]]] = {}
    for one in requests:
        found.setdefault(kind(one), []).append(one)
    return found


def _share(limits: Limits) -> float:
    """Confidence of each one-sided bound."""
    return 1 - (1 - limits.confidence) / (2 * TESTS)


def rounds_a_token(requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Of requests with a round: between 1 / (k + 1) and 1."""
    pairs = ((one["rounds"], one["accepted"]) for one in requests if one["rounds"])
    return np.array([rounds / (rounds + accepted) for rounds, accepted in pairs], float)


def _token_ms(requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([one["token_ms"] for one in requests if one["token_ms"] is not None], float)


def _aborted(requests: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([one["reason"] == "abort" for one in requests], float)
