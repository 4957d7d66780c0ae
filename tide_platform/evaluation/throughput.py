"""What a draft is worth under the traffic that is served: output tokens a second, over the target alone.

What is known: n_b decode steps had b requests in them (`ledger.history`), under the champion; what a plain
step T(b) and a round r(b, k) T(b) cost (cost_model.py); and what a round gives a request, the acceptance
length E(k), of each draft (replay).

**What the weights are.** Steps are no measure of the load: a faster draft needs fewer of them for the same
answers. The load at batch size b are its tokens, n_b b E_c(k_b), with k_b what the champion is served with.
A draft d that speculates k steps gives b E_d(k) tokens in r(b, k) T(b), so the same tokens take it

    n_b E_c(k_b) T(b) / S_d(b),     S_d(b) = E_d(k) / r(b, k)

and the target alone (S = 1) ``w_b = n_b E_c(k_b) T(b)``. Over all batch sizes the draft is

    sum over b of w_b  /  sum over b of w_b / S_d(b)

times as fast as the target alone: the harmonic mean of S_d(b), weighted by the time the target alone would
need. For the champion ``w_b / S_c(b) = n_b r(b, k_b) T(b)``, the time that its steps took; so challenger over
champion is the time that was spent over the time that would have been. Assumed: each token is decoded at the
batch size it was decoded at (a faster draft does not make its requests meet fewer others), and what earlier
drafts did in these hours is counted as if the champion had.

**Fixed k.** S_d(b) / S_c(b) = E_d(k) / E_c(k) at every b: challenger over champion is the ratio of acceptance
lengths, whatever the batch sizes and the costs. They decide the level (is either faster than the target
alone?), not the comparison. **Adaptive k** (`serving.adaptive`): each draft has its own fastest k at each
batch size, 0 among them, and the comparison depends on both.

Shapes: S resamples, N requests, B batch sizes, K steps, 2 drafts (champion, challenger).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tide_platform.config import TideError
from tide_platform.evaluation.acceptance import RequestReplay
from tide_platform.evaluation.cost_model import CostModel, NotMeasured
from tide_platform.evaluation.statistics import bounds, paired_counts


class NoTraffic(TideError):
    """No decode step to predict for."""

    def __init__(self) -> None:
        super().__init__("no decode step is known to predict tokens a second for; send traffic first")


@dataclass(frozen=True)
class AtBatch:
    """At one batch size; speeds are over the target alone."""

    batch: int
    time_share: float  # of the champion's decoding time
    champion: float
    challenger: float
    champion_k: int  # speculative steps that it is predicted with
    challenger_k: int
    measured: bool  # False: outside of what was measured, at the costs of the nearest batch size


@dataclass(frozen=True)
class Throughput:
    """Predicted output tokens a second of both drafts under one histogram of decode steps."""

    champion: float  # over the target alone
    challenger: float
    ratio: float  # challenger / champion
    lower: float  # one-sided bounds of the ratio, each at `confidence`
    upper: float
    confidence: float
    adaptive: bool  # each draft at its fastest k
    steps: int  # decode steps in the histogram
    by_batch: list[AtBatch] = field(default_factory=list)

    @property
    def outside(self) -> float:
        """Share of the time at batch sizes outside of those measured."""
        return sum(each.time_share for each in self.by_batch if not each.measured)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "Throughput":
        values: dict[str, Any] = dict(raw)
        values["by_batch"] = [AtBatch(**each) for each in raw["by_batch"]]
        return cls(**values)


@dataclass(frozen=True)
class _Load:
    """The histogram with its costs. ``plain_B``: n_b T(b), milliseconds. ``rounds_BK`` in plain steps, of
    ``ks``; with adaptive k a column for no speculation stands before them.
    """

    batches: list[int]
    plain_B: np.ndarray
    ks: list[int]
    rounds_BK: np.ndarray


def predict(
    champion: Sequence[RequestReplay],
    challenger: Sequence[RequestReplay],
    model: CostModel,
    steps: Mapping[int, int],
    *,
    k: int,
    adaptive: bool,
    confidence: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Throughput:
    """Of paired replays and ``steps`` (batch size -> decode steps), at ``k``, or where ``adaptive`` each
    draft at its fastest steps by batch size.

    The interval is :func:`~tide_platform.evaluation.statistics.compare`'s: requests drawn with replacement,
    the same ones for both drafts and for all k; a resample chooses its k as the estimate did. Raises
    :class:`NoTraffic`, :class:`NotMeasured` where there are no costs for ``k``, and
    :class:`~tide_platform.evaluation.statistics.NotPaired`.
    """
    known = set.intersection(*(set(each.by_k) for each in (*champion, *challenger)))
    load = _load(model, steps, known, k, adaptive)
    counts_NK4 = np.stack([paired_counts(champion, challenger, each) for each in load.ks], axis=1)
    requests = len(counts_NK4)
    weights_SN = np.random.default_rng(seed).multinomial(
        requests, np.full(requests, 1 / requests), size=resamples
    )
    drawn_SK4 = (weights_SN @ counts_NK4.reshape(requests, -1)).reshape(resamples, -1, 4)
    drawn_SK4 = drawn_SK4[(drawn_SK4[..., [1, 3]] > 0).all((1, 2))]
    chosen_B2, speed_B2, time_B2 = (each[0] for each in _decode(_lengths(counts_NK4.sum(0)[None]), load))
    whole_2 = _over_all(speed_B2[None], time_B2[None])[0]
    found_S2 = _over_all(*_decode(_lengths(drawn_SK4), load)[1:])
    lower, upper = bounds(found_S2[:, 1] / found_S2[:, 0], requests, confidence)
    shares_B = time_B2[:, 0] / time_B2[:, 0].sum()
    steps_K = [0, *load.ks] if adaptive else load.ks
    return Throughput(
        champion=float(whole_2[0]),
        challenger=float(whole_2[1]),
        ratio=float(whole_2[1] / whole_2[0]),
        lower=lower,
        upper=upper,
        confidence=confidence,
        adaptive=adaptive,
        steps=sum(steps.values()),
        by_batch=[
            AtBatch(
                batch=batch,
                time_share=float(shares_B[i]),
                champion=float(speed_B2[i, 0]),
                challenger=float(speed_B2[i, 1]),
                champion_k=steps_K[chosen_B2[i, 0]],
                challenger_k=steps_K[chosen_B2[i, 1]],
                measured=model.covers(batch),
            )
            for i, batch in enumerate(load.batches)
        ],
    )


def _load(model: CostModel, steps: Mapping[int, int], known: set[int], k: int, adaptive: bool) -> _Load:
    batches = sorted(batch for batch, count in steps.items() if count > 0)
    if not batches:
        raise NoTraffic
    costs = [model.near(batch) for batch in batches]
    both = known.intersection(*(each.verify for each in costs))
    if not adaptive and k not in both:
        raise NotMeasured(f"k = {k}", sorted(both))
    ks = sorted(both) if adaptive else [k]
    plain_B = np.array([steps[batch] * of.step_ms for batch, of in zip(batches, costs, strict=True)])
    rounds_BK = np.array([[of.round(each) for each in ks] for of in costs]).reshape(len(batches), len(ks))
    if adaptive:  # the target alone first: of equally fast steps the fewest are taken
        rounds_BK = np.hstack([np.ones((len(batches), 1)), rounds_BK])
    return _Load(batches, plain_B, ks, rounds_BK)


def _lengths(sums_SK4: np.ndarray) -> np.ndarray:
    """Acceptance lengths [S, K, 2] of sums over requests."""
    return 1 + sums_SK4[..., [0, 2]] / sums_SK4[..., [1, 3]]


def _decode(lengths_SK2: np.ndarray, load: _Load) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each batch size, all [S, B, 2]: column of the steps in ``load.rounds_BK``, speed over the target
    alone, and time for the tokens that the champion has said there.
    """
    if load.rounds_BK.shape[1] > len(load.ks):
        lengths_SK2 = np.concatenate([np.ones_like(lengths_SK2[:, :1]), lengths_SK2], axis=1)
    speeds_SBK2 = lengths_SK2[:, None] / load.rounds_BK[None, ..., None]
    chosen_SB2 = speeds_SBK2.argmax(2)
    speed_SB2 = np.take_along_axis(speeds_SBK2, chosen_SB2[:, :, None], 2)[:, :, 0]
    tokens_SB = np.take_along_axis(lengths_SK2[..., 0], chosen_SB2[..., 0], 1)  # a request, of a step
    alone_SB = load.plain_B * tokens_SB
    return chosen_SB2, speed_SB2, alone_SB[..., None] / speed_SB2


def _over_all(speed_SB2: np.ndarray, time_SB2: np.ndarray) -> np.ndarray:
    """[S, 2]: the time that the target alone would take, over each draft's."""
    return (speed_SB2 * time_SB2).sum(1) / time_SB2.sum(1)
