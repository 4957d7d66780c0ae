"""Predicted tokens a second under a histogram of batch sizes."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.evaluation.acceptance import KReplay, RequestReplay
from tide_platform.evaluation.cost_model import BatchCosts, CostModel, NotMeasured
from tide_platform.evaluation.statistics import compare
from tide_platform.evaluation.throughput import NoTraffic, Throughput, predict

KS = (1, 2, 3)
# a batch of 8 has no room for drafts: more rows cost as much as more steps
MODEL = CostModel(
    {
        1: BatchCosts(10.0, 0.1, {1: 1.0, 2: 1.0, 3: 1.0}),
        8: BatchCosts(30.0, 0.1, {1: 1.9, 2: 2.8, 3: 3.7}),
    },
    "t",
)


def replays(seed: int, rate: float, requests: int = 40) -> list[RequestReplay]:
    """Of drafts whose chains are drawn token by token at ``rate``."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(requests):
        by_k = {}
        for k in KS:
            hits = (rng.random((20, k)) < rate).cumprod(1).sum(0)
            by_k[k] = KReplay(20, int(hits.sum()), tuple(int(x) for x in hits))
        found.append(RequestReplay(f"r{i}", f"r{i}", 30, by_k))
    return found


A, B = replays(0, 0.4), replays(1, 0.6)

costs = st.builds(
    BatchCosts,
    st.floats(1, 100),
    st.floats(0, 0.5),
    st.fixed_dictionaries({k: st.floats(1, 6) for k in KS}),
)
models = st.dictionaries(st.integers(1, 64), costs, min_size=1, max_size=4).map(lambda by: CostModel(by, "t"))
loads = st.dictionaries(st.integers(1, 128), st.integers(1, 10_000), min_size=1, max_size=6)


@given(models, loads, st.sampled_from(KS))
@settings(max_examples=40, deadline=None)
def test_at_a_fixed_k_the_comparison_is_that_of_acceptance_lengths(
    model: CostModel, load: dict[int, int], k: int
) -> None:
    found = predict(A, B, model, load, k=k, adaptive=False, resamples=200)
    known = compare(A, B, k, resamples=200)
    expected = (known.ratio, known.lower, known.upper)
    assert (found.ratio, found.lower, found.upper) == pytest.approx(expected)
    assert sum(each.time_share for each in found.by_batch) == pytest.approx(1)
    for each in found.by_batch:
        assert each.champion == pytest.approx(known.champion / model.near(each.batch).round(k))


def test_the_level_is_time_over_time() -> None:
    """By hand: 300 steps alone of 10 ms, 100 steps of eight requests of 30 ms."""
    found = predict(A, B, MODEL, {1: 300, 8: 100}, k=2, adaptive=False)
    tokens = compare(A, B, 2).champion
    spent = 300 * 10 * 1.2 + 100 * 30 * 3.0
    alone = tokens * (300 * 10 + 100 * 30)  # plain steps for the tokens that these rounds have said
    assert found.champion == pytest.approx(alone / spent)
    assert [each.time_share for each in found.by_batch] == pytest.approx([3600 / spent, 9000 / spent])
    assert found.steps == 400 and found.outside == 0


def test_with_adaptive_k_the_batch_sizes_decide_the_comparison() -> None:
    alone = predict(A, B, MODEL, {1: 100}, k=2, adaptive=True)
    crowded = predict(A, B, MODEL, {8: 100}, k=2, adaptive=True)
    assert alone.ratio > 1.2 and alone.lower > 1.1
    assert (crowded.ratio, crowded.lower, crowded.upper) == (1, 1, 1), "no draft is worth running there"
    only = crowded.by_batch[0]
    assert (only.champion, only.champion_k, only.challenger_k) == (1, 0, 0)
    mixed = predict(A, B, MODEL, {1: 100, 8: 100}, k=2, adaptive=True)
    assert 1 < mixed.ratio < alone.ratio
    assert [each.challenger_k for each in mixed.by_batch] == [3, 0]


@given(models, loads)
@settings(max_examples=40, deadline=None)
def test_the_fastest_k_is_never_slower_than_a_fixed_one_or_none(
    model: CostModel, load: dict[int, int]
) -> None:
    chosen = predict(A, B, model, load, k=2, adaptive=True, resamples=50)
    assert chosen.champion >= 1 - 1e-9 and chosen.challenger >= 1 - 1e-9
    fixed = predict(A, B, model, load, k=2, adaptive=False, resamples=50)
    for best, other in zip(chosen.by_batch, fixed.by_batch, strict=True):
        assert best.champion >= other.champion - 1e-9 and best.challenger >= other.challenger - 1e-9


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_same_draft_is_exactly_as_fast(adaptive: bool) -> None:
    found = predict(A, A, MODEL, {1: 5, 4: 7}, k=2, adaptive=adaptive, resamples=100)
    assert (found.ratio, found.lower, found.upper) == (1, 1, 1)


def test_equal_drafts_are_shown_faster_no_more_often_than_the_confidence_allows() -> None:
    """With adaptive k, whose maximum over steps is no smooth function."""
    shown = [
        predict(
            replays(2 * trial, 0.5), replays(2 * trial + 1, 0.5), MODEL, {1: 100, 4: 100}, k=2, adaptive=True,
            resamples=400, seed=trial,
        ).lower > 1
        for trial in range(200)
    ]  # fmt: skip
    assert np.mean(shown) <= 0.08


def test_costs_between_batch_sizes_are_straight_lines_of_time_and_outside_the_nearest() -> None:
    half = MODEL.near(4.5)
    assert half.step_ms == pytest.approx(20)
    assert half.round(1) * half.step_ms == pytest.approx((1.1 * 10 + 2.0 * 30) / 2)
    assert half.draft == pytest.approx((0.1 * 10 + 0.1 * 30) / 2 / 20)
    assert MODEL.near(1) == MODEL.by_batch[1]
    assert MODEL.near(64).round(3) == pytest.approx(MODEL.by_batch[8].round(3)) and not MODEL.covers(64)
    found = predict(A, B, MODEL, {8: 100, 64: 300}, k=1, adaptive=False, resamples=50)
    assert [each.measured for each in found.by_batch] == [True, False]
    assert found.outside == pytest.approx(0.75)


def test_only_steps_that_both_neighbours_have_are_known_between_them() -> None:
    model = CostModel({1: MODEL.by_batch[1], 8: BatchCosts(30.0, 0.1, {1: 1.9})}, "t")
    assert sorted(model.near(4).verify) == [1] and sorted(model.near(1).verify) == [1, 2, 3]
    with pytest.raises(NotMeasured, match="no k = 2, only 1"):
        predict(A, B, model, {4: 10}, k=2, adaptive=False)
    assert predict(A, B, model, {4: 10}, k=2, adaptive=True, resamples=50).by_batch[0].challenger_k in (0, 1)


def test_without_a_step_there_is_nothing_to_predict_for() -> None:
    with pytest.raises(NoTraffic, match="send traffic"):
        predict(A, B, MODEL, {4: 0}, k=2, adaptive=False)


def test_it_is_whole_after_json() -> None:
    found = predict(A, B, MODEL, {1: 5, 64: 7}, k=2, adaptive=True, resamples=100)
    assert Throughput.from_json(json.loads(json.dumps(asdict(found)))) == found
