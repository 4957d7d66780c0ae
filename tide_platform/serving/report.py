"""What a run of traffic showed: speed, latencies, acceptance. Ratios are of sums, never means of ratios."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tide_platform.serving.client import Generation


@dataclass(frozen=True)
class TrafficReport:
    """Of the requests that ended well; those that did not are in ``errors``."""

    requests: int
    concurrency: int
    wall_s: float  # from the first request sent to the last answer
    prompt_tokens: int
    completion_tokens: int
    tokens_per_s: float  # completion tokens over wall_s
    verify_rounds: int
    accepted_drafts: int
    acceptance_length: float | None  # None where no round took place: no speculation
    by_position: list[float]  # [i]: share of rounds that accepted draft token i+1, of those that accepted i
    latency_p50_s: float
    latency_p90_s: float
    latency_p99_s: float
    errors: list[str] = field(default_factory=list)
    per_request: list[Generation] = field(default_factory=list)

    def to_json(self, per_request: bool = False) -> dict[str, Any]:
        """For printing; ``per_request`` adds every request's counts, without its text."""
        raw = asdict(self)
        requests = raw.pop("per_request")
        if per_request:
            hidden = ("text", "output_ids")
            raw["per_request"] = [
                {key: value for key, value in request.items() if key not in hidden} for request in requests
            ]
        return raw


def summarize(
    done: Sequence[Generation], errors: Sequence[str], wall_s: float, concurrency: int
) -> TrafficReport:
    """The report on the requests ``done`` within ``wall_s`` seconds."""
    completion = sum(generation.completion_tokens for generation in done)
    rounds = sum(generation.verify_rounds for generation in done)
    accepted = sum(generation.accepted_drafts for generation in done)
    latencies = sorted(generation.latency_s for generation in done)
    return TrafficReport(
        requests=len(done),
        concurrency=concurrency,
        wall_s=wall_s,
        prompt_tokens=sum(generation.prompt_tokens for generation in done),
        completion_tokens=completion,
        tokens_per_s=completion / wall_s if wall_s else 0.0,
        verify_rounds=rounds,
        accepted_drafts=accepted,
        acceptance_length=acceptance_length(rounds, accepted),
        by_position=acceptance_by_position([generation.rounds_by_accepted for generation in done]),
        latency_p50_s=percentile(latencies, 0.5),
        latency_p90_s=percentile(latencies, 0.9),
        latency_p99_s=percentile(latencies, 0.99),
        errors=list(errors),
        per_request=list(done),
    )


def acceptance_length(verify_rounds: int, accepted_drafts: int) -> float | None:
    """Design 2: tokens a verify round, the bonus token included; a ratio of sums."""
    return 1 + accepted_drafts / verify_rounds if verify_rounds else None


def acceptance_by_position(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Of rounds by number of accepted drafts: P(draft i+1 accepted | draft i accepted) for i = 0, 1, …

    A position that no round reached is left out, with all after it.
    """
    length = max((len(histogram) for histogram in histograms), default=0)
    rounds = [sum(h[i] for h in histograms if i < len(h)) for i in range(length)]
    at_least = [sum(rounds[i:]) for i in range(length)]
    return [at_least[i + 1] / at_least[i] for i in range(length - 1) if at_least[i]]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of ascending values; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
