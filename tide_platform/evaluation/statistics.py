"""Is the challenger better than the champion? Paired, with the uncertainty that so many requests allow."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_platform.config import TideError
from tide_platform.evaluation.acceptance import RequestReplay, acceptance_length, counts
from tide_platform.evaluation.sequence import Evidence, evidence


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
    """Acceptance lengths of two drafts on the same requests.

    ``lower`` and ``upper`` hold for one look, ``evidence`` for any number of them; ``ratio`` weighs requests
    by their tokens, ``evidence.ratio`` weighs them alike. ``evidence`` is None where the replays do not say
    how many roots they had.
    """

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
    evidence: Evidence | None


def compare(
    champion: Sequence[RequestReplay],
    challenger: Sequence[RequestReplay],
    k: int,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
    margin: float = 0.0,
) -> Comparison:
    """Ratio of the two acceptance lengths at ``k``, by bootstrap over requests (stretches of a request stay
    together; both drafts see the same resampled requests: Efron & Tibshirani 1993, chapter 13), and the
    evidence for a gain above ``margin`` that may be looked at again (sequence.py).

    Raises :class:`NotPaired`, and :class:`~tide_platform.evaluation.acceptance.NothingToReplay` if there is
    no round.
    """
    counts_N4 = paired_counts(champion, challenger, k)
    points = acceptance_length(champion, k), acceptance_length(challenger, k)
    ratios = bootstrap_ratios(counts_N4, resamples, np.random.default_rng(seed))
    lower, upper = bounds(ratios, len(counts_N4), confidence)
    told = all(each.roots for each in (*champion, *challenger))
    return Comparison(
        k=k,
        champion=points[0],
        challenger=points[1],
        ratio=points[1] / points[0],
        lower=lower,
        upper=upper,
        confidence=confidence,
        requests=len(counts_N4),
        resamples=resamples,
        seed=seed,
        evidence=evidence(champion, challenger, k, confidence, margin) if told else None,
    )


def paired_counts(
    champion: Sequence[RequestReplay], challenger: Sequence[RequestReplay], k: int
) -> np.ndarray:
    """By request [N, 4]: accepted drafts and rounds of the champion, then of the challenger.

    Raises :class:`NotPaired`.
    """
    of_a, of_b = _by_sample(champion, k), _by_sample(challenger, k)
    if of_a.keys() != of_b.keys():
        raise NotPaired(len(of_a.keys() - of_b.keys()), len(of_b.keys() - of_a.keys()))
    requests = sorted({request for request, _ in of_a})
    index = {request: i for i, request in enumerate(requests)}
    counted = np.zeros((len(requests), 4))
    for (request, sample), of_champion in of_a.items():
        counted[index[request]] += (*of_champion, *of_b[request, sample])
    return counted


def bootstrap_ratios(counts_N4: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Ratios of acceptance lengths, challenger over champion, of ``resamples`` draws of the requests."""
    requests = len(counts_N4)
    return ratios_of(rng.multinomial(requests, np.full(requests, 1 / requests), size=resamples) @ counts_N4)


def ratios_of(sums_S4: np.ndarray) -> np.ndarray:
    """Of sums over requests, columns as in :func:`paired_counts`; those without a round are left out."""
    drawn = sums_S4[(sums_S4[:, 1] > 0) & (sums_S4[:, 3] > 0)]
    return (1 + drawn[:, 2] / drawn[:, 3]) / (1 + drawn[:, 0] / drawn[:, 1])


def bounds(ratios: np.ndarray, requests: int, confidence: float) -> tuple[float, float]:
    """One-sided bounds, each at ``confidence``, from the bootstrap's ratios: expanded percentiles, which make
    up for the narrowness of few requests (Hesterberg 2015, *What teachers should know about the bootstrap*,
    section 5.3).
    """
    from scipy.stats import norm, t

    level = 1 - confidence
    if requests > 1:
        level = float(norm.cdf(np.sqrt(requests / (requests - 1)) * t.ppf(level, requests - 1)))
    lower, upper = np.quantile(ratios, [level, 1 - level])
    return float(lower), float(upper)


def _by_sample(replays: Sequence[RequestReplay], k: int) -> dict[tuple[str, str], np.ndarray]:
    keys = [(r.request_id, r.sample_id) for r in replays]
    return dict(zip(keys, counts(replays, k), strict=True))
