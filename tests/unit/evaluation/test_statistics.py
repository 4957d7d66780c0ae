"""The paired bootstrap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.evaluation.acceptance import KReplay, RequestReplay
from tide_platform.evaluation.statistics import NotPaired, compare

Pairs = list[tuple[int, int]]  # (rounds, accepted)


def replays(pairs: Pairs) -> list[RequestReplay]:
    return [RequestReplay(f"r{i}", f"s{i}", 10, {2: KReplay(n, a, (a, 0))}) for i, (n, a) in enumerate(pairs)]


pairs = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=2, max_size=30)


@given(pairs)
@settings(deadline=None)  # the first call imports scipy
def test_the_same_draft_is_exactly_as_good(drawn: Pairs) -> None:
    c = compare(replays(drawn), replays(drawn), 2, resamples=50)
    assert (c.ratio, c.lower, c.upper) == (1, 1, 1)


@given(pairs, st.integers(0, 9))
@settings(deadline=None)
def test_bounds_hold_the_point_and_repeat(drawn: Pairs, seed: int) -> None:
    better = [(n, a + 1) for n, a in drawn]
    c = compare(replays(drawn), replays(better), 2, resamples=200, seed=seed)
    assert c == compare(replays(drawn), replays(better), 2, resamples=200, seed=seed)
    assert c.ratio > 1 and c.lower > 1 and c.lower <= c.upper


def test_coverage_of_the_lower_bound() -> None:
    """The true ratio lies above the lower bound in about `confidence` of the experiments."""
    rng = np.random.default_rng(0)
    above = 0
    for trial in range(200):
        p = rng.beta(8, 12, 60).clip(max=0.9)  # requests differ; both drafts see the same ones
        a = [(30, int(x)) for x in rng.binomial(30, p)]
        b = [(30, int(x)) for x in rng.binomial(30, p * 1.1)]
        above += compare(replays(a), replays(b), 2, 0.9, resamples=400, seed=trial).lower <= (1 + 0.44) / 1.4
    assert 0.82 <= above / 200 <= 0.97


def test_stretches_of_a_request_stay_together() -> None:
    split = [RequestReplay("r", f"s{i}", 10, {2: KReplay(5, i, (i, 0))}) for i in range(4)]
    assert compare(split, split, 2).requests == 1


def test_unpaired_is_refused() -> None:
    with pytest.raises(NotPaired, match="replay both on the same samples"):
        compare(replays([(1, 1)]), replays([(1, 1), (2, 1)]), 2)
