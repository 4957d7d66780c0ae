"""Acceptance by slice of the traffic: who asked, how long the prompt was, which draft served, how it was
drawn; and which slices a challenger loses. Pure: no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_platform.capture.record import SampleMeta
from tide_platform.evaluation.acceptance import RequestReplay, acceptance_length
from tide_platform.evaluation.statistics import paired_counts

PROMPT_LENGTHS = (64, 256, 1024, 4096)  # upper ends of the buckets, tokens
TEMPERATURES = (0.0, 0.5, 1.0)
NO_FLAG = "none"
# which draft served says nothing of who is served
FLOORED = ("tenant", "prompt_tokens", "flags", "temperature")
# of an equal draft being held to be worse in any slice, by the t distribution. With 20 to 40 requests its
# tails are too light: simulated, it is up to twice this (tests/unit/evaluation/test_slice_floor.py)
CHANCE = 0.005


@dataclass(frozen=True)
class Slice:
    """Both drafts on the requests of one slice."""

    dimension: str  # tenant | prompt_tokens | draft_version | flags | temperature
    value: str
    requests: int
    champion: float  # acceptance lengths at the served k
    challenger: float
    error: float | None = None  # standard error of the log of their ratio; None of a single request

    @property
    def gain(self) -> float:
        return self.challenger / self.champion - 1

    @property
    def name(self) -> str:
        return f"{self.dimension} {self.value}"

    def upper(self, chance: float) -> float:
        """Bound that challenger over champion exceeds with probability ``chance`` (t distribution)."""
        from scipy.stats import t

        if self.error is None:
            return math.inf
        return (1 + self.gain) * math.exp(self.error * float(t.ppf(1 - chance, self.requests - 1)))


def labels(meta: SampleMeta) -> dict[str, tuple[str, ...]]:
    """The slices that a sample belongs to; of ``flags`` it may be several."""
    return {
        "tenant": (meta.tenant,),
        "prompt_tokens": (_bucket(meta.prompt_tokens, PROMPT_LENGTHS),),
        "draft_version": (meta.draft_version_start[:12],),
        "flags": meta.flags or (NO_FLAG,),
        "temperature": (_bucket(meta.temperature, TEMPERATURES),),
    }


def by_slice(champion: Sequence[RequestReplay], challenger: Sequence[RequestReplay], k: int) -> list[Slice]:
    """Every slice that has a verify round, by dimension and value. Both sequences hold the same samples."""
    found: dict[tuple[str, str], tuple[list[RequestReplay], list[RequestReplay]]] = {}
    other = {(r.request_id, r.sample_id): r for r in challenger}
    for each in champion:
        for dimension, values in each.labels.items():
            for value in values:
                of_both = found.setdefault((dimension, value), ([], []))
                of_both[0].append(each)
                of_both[1].append(other[each.request_id, each.sample_id])
    return [
        Slice(
            dimension,
            value,
            len({r.request_id for r in of_champion}),
            acceptance_length(of_champion, k),
            acceptance_length(of_challenger, k),
            standard_error(paired_counts(of_champion, of_challenger, k)),
        )
        for (dimension, value), (of_champion, of_challenger) in sorted(found.items())
        if any(r.by_k[k].rounds for r in of_champion) and any(r.by_k[k].rounds for r in of_challenger)
    ]


def under_floor(slices: Sequence[Slice], floor: float, least: int) -> list[Slice]:
    """The slices whose requests the challenger serves worse: its acceptance length is below ``floor`` of the
    champion's, and that it is as good as the champion there can be ruled out.

    Slices of fewer than ``least`` requests are not judged. The more are, the surer each must be
    (Bonferroni), so that equal drafts fail on any of them about once in a hundred verdicts.
    """
    judged = [each for each in slices if each.dimension in FLOORED and each.requests >= least]
    return [each for each in judged if 1 + each.gain < floor and each.upper(CHANCE / len(judged)) < 1]


def standard_error(counts_N4: np.ndarray) -> float | None:
    """Of log(challenger / champion acceptance length), by leaving out one request at a time (jackknife); the
    counts are :func:`~tide_platform.evaluation.statistics.paired_counts`'.

    A bootstrap's percentiles would not do: slices are many, so each is judged at a level far out in the tail.
    """
    requests = len(counts_N4)
    others_N4 = counts_N4.sum(0) - counts_N4
    if requests < 2 or not (others_N4[:, [1, 3]] > 0).all():
        return None
    logs_N = np.log(1 + others_N4[:, 2] / others_N4[:, 3]) - np.log(1 + others_N4[:, 0] / others_N4[:, 1])
    return float(np.sqrt((requests - 1) / requests * ((logs_N - logs_N.mean()) ** 2).sum()))


def _bucket(value: float, ends: Sequence[float]) -> str:
    """``"<= 64"``, ..., ``"> 4096"``; an end of 0 is a bucket of its own."""
    for end in ends:
        if value <= end:
            return f"{end:g}" if end == 0 else f"<= {end:g}"
    return f"> {ends[-1]:g}"
