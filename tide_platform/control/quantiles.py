"""Quantiles that can be added up: counts in buckets whose bounds grow by a fixed factor, so a quantile is off
by half that factor at most, whatever the distribution. (The buckets of DDSketch, Masson et al. 2019.)
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

FACTOR = 1.05


def sketch(values: Iterable[float]) -> dict[str, int]:
    """Counts by bucket, as JSON holds them. Values must be above 0."""
    return dict(Counter(str(math.ceil(math.log(value) / math.log(FACTOR))) for value in values))


def merged(sketches: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sketch of all values together."""
    counts: Counter[str] = Counter()
    for each in sketches:
        counts.update(each)
    return dict(counts)


def quantile(counts: Mapping[str, int], share: float) -> float | None:
    """The value that ``share`` of all are not above, to 2.5 %; None of nothing."""
    left = share * sum(counts.values())
    for bucket in sorted(counts, key=int):
        left -= counts[bucket]
        if left <= 1e-9:
            return FACTOR ** int(bucket) / (1 + (FACTOR - 1) / 2)
    return None
