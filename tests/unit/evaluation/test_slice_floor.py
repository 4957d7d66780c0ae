"""Which slices a challenger is held to lose, by simulation."""

import numpy as np
import pytest
from traffic import Experiments, alike_experiments, experiments

from tide_platform.evaluation.slices import Slice, standard_error, under_floor

TENTH_WORSE = 0.77  # factor on the acceptance rate: 10 % of the acceptance length
AS_A_FINE_TUNE = 0.7  # of a draft's luck is the champion's


def sliced(of: Experiments, trial: int, name: str = "a") -> Slice:
    counts = of.counts(trial)
    sums = counts.sum(0)
    lengths = 1 + sums[0] / sums[1], 1 + sums[2] / sums[3]
    return Slice("tenant", name, len(counts), *lengths, standard_error(counts))


def ten(of: Experiments, experiment: int) -> list[Slice]:
    return [sliced(of, 10 * experiment + i, f"{i}") for i in range(10)]


def rejected(of: Experiments, experiments: int) -> float:
    """Share of experiments, of ten slices each, with a slice under the floor."""
    return float(np.mean([bool(under_floor(ten(of, i), 0.95, 20)) for i in range(experiments)]))


@pytest.mark.parametrize("requests", [20, 40, 100])
def test_equal_drafts_fail_on_one_of_ten_slices_once_in_a_hundred(requests: int) -> None:
    mine = alike_experiments(1, 4000, requests, 1.0, AS_A_FINE_TUNE)
    assert rejected(mine, 400) <= 0.02
    assert rejected(experiments(2, 4000, requests, 1.0), 400) <= 0.025, "each with its own luck"


def test_a_slice_a_tenth_worse_is_found_among_nine_good_ones() -> None:
    good = alike_experiments(3, 9 * 400, 40, 1.0, AS_A_FINE_TUNE)
    bad = alike_experiments(4, 400, 40, TENTH_WORSE, AS_A_FINE_TUNE)
    found = []
    for i in range(400):
        slices = [sliced(good, 9 * i + j, f"{j}") for j in range(9)] + [sliced(bad, i, "bad")]
        found.append([each.value for each in under_floor(slices, 0.95, 20)])
    assert np.mean(["bad" in names for names in found]) >= 0.93
    assert np.mean([names not in (["bad"], []) for names in found]) <= 0.02


def test_two_drafts_that_have_nothing_in_common_are_told_apart_less_often() -> None:
    bad = experiments(5, 4000, 40, TENTH_WORSE)
    alone = [sliced(bad, i) for i in range(400)]
    others = [Slice("tenant", f"{i}", 40, 1.5, 1.5, 0.02) for i in range(9)]
    share = np.mean([bool(under_floor([each, *others], 0.95, 20)) for each in alone])
    assert 0.65 <= share <= 0.85
    many = [sliced(experiments(6, 1, 400, TENTH_WORSE), 0), *others]
    assert [each.requests for each in under_floor(many, 0.95, 20)] == [400]


def test_only_slices_of_who_is_served_with_enough_requests_are_judged() -> None:
    bad = Slice("tenant", "a", 40, 2.0, 1.5, 0.01)
    assert under_floor([bad], 0.95, 20) == [bad]
    for other in (
        Slice("draft_version", "a", 40, 2.0, 1.5, 0.01),
        Slice("tenant", "a", 19, 2.0, 1.5, 0.01),
        Slice("tenant", "a", 40, 2.0, 1.92, 0.001),  # surely worse, but above the floor
        Slice("tenant", "a", 40, 2.0, 1.5, 0.2),  # below it, perhaps by chance
        Slice("tenant", "a", 40, 2.0, 1.5, None),
    ):
        assert under_floor([other], 0.95, 20) == []


def test_the_standard_error_is_the_spread_of_the_log_ratio() -> None:
    of = alike_experiments(7, 500, 60, 1.1, 0.5)
    logs = [np.log(1 + sliced(of, i).gain) for i in range(500)]
    errors = [standard_error(of.counts(i)) for i in range(500)]
    assert np.mean([each for each in errors if each is not None]) == pytest.approx(np.std(logs), rel=0.1)
    same = of.counts(0)[:, [0, 1, 0, 1]]
    assert standard_error(same) == 0 and standard_error(same[:1]) is None
