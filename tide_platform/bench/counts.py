"""What a server or a replay counted of requests, and drafts compared by it."""

from collections.abc import Sequence

from tide_platform.evaluation.acceptance import KReplay, RequestReplay
from tide_platform.evaluation.statistics import compare

Counts = dict[str, list[float]]  # request -> [verify rounds, accepted drafts]
_ANY_K = 1  # counts are of one k; which one makes no difference to their comparison


def compare_counts(base: Sequence[Counts], these: Sequence[Counts]) -> tuple[float, tuple[float, float]]:
    """Ratio of acceptance lengths, ``these`` over ``base``, sums over the seeds; the interval is over
    requests, whose seeds stay together. A run is ``[verify rounds, accepted drafts]`` by request.
    """

    def replays(runs: Sequence[Counts]) -> list[RequestReplay]:
        return [
            RequestReplay(request, str(order), 0, {_ANY_K: KReplay(rounds, accepted, ())})
            for order, of in enumerate(runs)
            for request, (rounds, accepted) in of.items()
        ]

    found = compare(replays(base), replays(these), _ANY_K, confidence=0.975)
    return found.ratio, (found.lower, found.upper)


def counts_of(replays: Sequence[RequestReplay], k: int) -> Counts:
    """``[verify rounds, accepted drafts]`` at ``k``, by request."""
    return {r.request_id: [r.by_k[k].rounds, r.by_k[k].accepted] for r in replays}
