"""Is the challenger better than the champion? Paired, with the uncertainty that so many requests allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_platform.config import TideError
from tide_platform.evaluation.acceptance import RequestReplay, acceptance_length


class NotPaired(TideError):
    """The two drafts were replayed on different samples."""

    def __init__(self, only_champion: int, only_challenger: int):
        super().__init__(
            f"{only_champion} samples were replayed with the champion only, "
            f"{only_challenger} with the challenger only; "
            "replay both on the same samples"
        )
        self.only_champion, self.only_challenger = only_champion, only_challenger


@dataclass(frozen=True)
class Comparison:
    """Acceptance lengths of two drafts on the same requests."""

    k: int  # speculative steps
    champion: float
    challenger: float
    ratio: float  # challenger / champion
    lower: float  # one-sided bounds of the ratio, each at `confidence`
    upper: float
    confidence: float
    requests: int
    resamples: int
    seed: int


def compare(
    champion: Sequence[RequestReplay],
    challenger: Sequence[RequestReplay],
    k: int,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Comparison:
    """Ratio of the two acceptance lengths at ``k``, with a percentile bootstrap over requests (stretches of a
    request stay together; both drafts see the same resampled requests: Efron & Tibshirani 1993, chapter 13).

    Raises :class:`NotPaired`, and :class:`~tide_platform.evaluation.acceptance.NothingToReplay` if there is
    no round.
    """
    sums_a, sums_b = _by_sample(champion, k), _by_sample(challenger, k)
    if sums_a.keys() != sums_b.keys():
        raise NotPaired(len(sums_a.keys() - sums_b.keys()), len(sums_b.keys() - sums_a.keys()))
    points = acceptance_length(champion, k), acceptance_length(challenger, k)
    requests = sorted({request for request, _ in sums_a})
    index = {request: i for i, request in enumerate(requests)}
    counts = np.zeros((len(requests), 4))  # accepted and rounds of the champion, then of the challenger
    for (request, sample), of_champion in sums_a.items():
        counts[index[request]] += (*of_champion, *sums_b[request, sample])
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(requests), np.full(len(requests), 1 / len(requests)), size=resamples) @ counts
    drawn = drawn[(drawn[:, 1] > 0) & (drawn[:, 3] > 0)]
    ratios = (1 + drawn[:, 2] / drawn[:, 3]) / (1 + drawn[:, 0] / drawn[:, 1])
    lower, upper = np.quantile(ratios, [1 - confidence, confidence])
    return Comparison(
        k=k,
        champion=points[0],
        challenger=points[1],
        ratio=points[1] / points[0],
        lower=float(lower),
        upper=float(upper),
        confidence=confidence,
        requests=len(requests),
        resamples=resamples,
        seed=seed,
    )


def _by_sample(replays: Sequence[RequestReplay], k: int) -> dict[tuple[str, str], tuple[int, int]]:
    return {(r.request_id, r.sample_id): (r.by_k[k].accepted, r.by_k[k].rounds) for r in replays}
