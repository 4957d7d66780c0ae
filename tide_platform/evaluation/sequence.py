"""Evidence that may be looked at again and again: an e-process and a confidence sequence for the ratio of two
drafts' acceptance lengths, by betting (Waudby-Smith & Ramdas 2023, *Estimating means of bounded random
variables by betting*; the bets are their diversified Kelly, section B.4).

Of request i with U roots (positions at which a round can start) draft a takes x_a rounds a root, a number
between 1 / (k + 1) and 1, and 1 / x_a is its acceptance length there. Both drafts are replayed on the same
text, so ``ratio = E[x_a] / E[x_b]`` is the ratio of acceptance lengths, b's over a's, **where every request
weighs alike**; :func:`~tide_platform.evaluation.statistics.compare` estimates the same ratio with requests
weighed by their tokens. With these weights each value lies in a known range whatever a request's length: a
bet must survive the worst value, so weights by tokens would cost the power of (longest / mean) times as many
requests. And no long request decides alone.

Null hypothesis for a ratio r: E[x_a - r x_b] <= 0. Someone who bets a share b of the most that cannot ruin
them, on each next request being above, has capital that is a nonnegative supermartingale from 1 under the
null; so is the mean capital of bettors with different shares. It exceeds 1 / alpha **at any time** with
probability at most alpha (Ville's inequality): look whenever you like, stop when you like. What it needs:
requests are exchangeable, in an order that does not depend on what they show (here: of arrival).

Shapes: T trials (independent experiments), N requests, G ratios, S shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_platform.evaluation.acceptance import RequestReplay

# of the largest bet that cannot ruin: small ones suit noisy requests, large ones a clear gain
SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.75, 0.95])
_GRID = 400  # ratios that the interval is inverted on


@dataclass(frozen=True)
class Evidence:
    """What the requests so far say of the ratio of acceptance lengths, challenger over champion, where each
    request weighs alike.
    """

    requests: int
    ratio: float  # of the means of rounds a root
    lower: float  # one-sided bounds, each at `confidence`, at all times at once
    upper: float
    confidence: float
    margin: float  # the gain that e_value is about
    e_value: float  # capital against "the gain is at most margin"; 1 / e_value is an anytime-valid p-value


def evidence(
    champion: Sequence[RequestReplay],
    challenger: Sequence[RequestReplay],
    k: int,
    confidence: float,
    margin: float = 0.0,
) -> Evidence:
    """Of paired replays on the same samples, in the order of the requests' arrival.

    Requests without a root are left out. Raises ``ValueError`` where that leaves none.
    """
    x_2N = _rounds_a_root(champion, challenger, k)
    if not x_2N.shape[1]:
        raise ValueError("no request has a position at which a round can start")
    log_alpha = np.log(1 - confidence)
    ratios = np.exp(np.linspace(-np.log(k + 1), np.log(k + 1), _GRID))
    above = log_capital(x_2N[0][None], x_2N[1][None], ratios, k).max(-1)[0]  # [G]
    below = log_capital(x_2N[1][None], x_2N[0][None], 1 / ratios, k).max(-1)[0]
    at_margin = log_capital(x_2N[0][None], x_2N[1][None], np.array([1 + margin]), k)[0, 0, -1]
    possible = np.flatnonzero((above < -log_alpha) & (below < -log_alpha))
    ratio = float(x_2N[0].mean() / x_2N[1].mean())
    # a step of the grid to the outside: what lies between two ratios was not tested
    low = ratios[max(0, possible[0] - 1)] if len(possible) else ratio
    high = ratios[min(_GRID - 1, possible[-1] + 1)] if len(possible) else ratio
    return Evidence(
        requests=x_2N.shape[1],
        ratio=ratio,
        lower=float(min(low, ratio)),
        upper=float(max(high, ratio)),
        confidence=confidence,
        margin=margin,
        e_value=float(np.exp(min(at_margin, 700.0))),
    )


def log_capital(a_TN: np.ndarray, b_TN: np.ndarray, ratios_G: np.ndarray, k: int) -> np.ndarray:
    """Log of the capital [T, G, N] after each request, against ``E[a] <= ratio * E[b]``.

    ``a_TN``, ``b_TN``: rounds a root, each in [1 / (k + 1), 1]. The worst outcome for who bets on a is
    a = 1 / (k + 1) with b = 1.
    """
    gain_TGN = a_TN[:, None] - ratios_G[:, None] * b_TN[:, None]
    worst_G = np.maximum(ratios_G - 1 / (k + 1), 1e-9)
    capital = None
    for share in SHARES:
        log_S = np.log1p(np.maximum(share * gain_TGN / worst_G[:, None], -1 + 1e-12)).cumsum(-1)
        capital = log_S if capital is None else np.logaddexp(capital, log_S)
    assert capital is not None
    return capital - np.log(len(SHARES))


def _rounds_a_root(
    champion: Sequence[RequestReplay], challenger: Sequence[RequestReplay], k: int
) -> np.ndarray:
    """[2, N] of champion and challenger; stretches of a request are one."""
    sums: dict[str, np.ndarray] = {}
    arrived: dict[str, float] = {}
    for row, replays in enumerate((champion, challenger)):
        for each in replays:
            counted = sums.setdefault(each.request_id, np.zeros(3))
            counted[row] += each.by_k[k].rounds
            counted[2] += each.roots if row == 0 else 0
            first = arrived.get(each.request_id, each.captured_at)
            arrived[each.request_id] = min(first, each.captured_at)
    order = sorted((r for r in sums if sums[r][2]), key=lambda request: (arrived[request], request))
    return np.array([sums[r][:2] / sums[r][2] for r in order]).reshape(-1, 2).T


def mean_bounds(values_N: np.ndarray, low: float, high: float, confidence: float) -> tuple[float, float]:
    """Bounds of the mean of values in [``low``, ``high``] that hold at all times at once, each one-sided at
    ``confidence``: the confidence sequence of the same bets (Waudby-Smith & Ramdas 2023, theorem 3).

    Without a value all means are possible.
    """
    if not len(values_N):
        return low, high
    x_N = np.clip((np.asarray(values_N, float) - low) / (high - low), 0.0, 1.0)
    means_G = np.linspace(0, 1, _GRID + 1)[1:-1]
    limit = -np.log(1 - confidence)
    shares_S = SHARES[:, None, None]

    def last_capital(gain_GN: np.ndarray, worst_G: np.ndarray) -> np.ndarray:
        log_SGN = np.log1p(np.maximum(shares_S * gain_GN / worst_G[:, None], -1 + 1e-12))
        return np.logaddexp.reduce(log_SGN.cumsum(-1), axis=0).max(-1) - np.log(len(SHARES))

    above_G = last_capital(x_N[None] - means_G[:, None], means_G) >= limit  # the mean is above these
    below_G = last_capital(means_G[:, None] - x_N[None], 1 - means_G) >= limit
    lower = means_G[above_G].max(initial=0.0)
    upper = means_G[below_G].min(initial=1.0)
    return low + float(lower) * (high - low), low + float(upper) * (high - low)
