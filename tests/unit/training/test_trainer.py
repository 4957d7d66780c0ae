"""The optimizer loop's parts."""

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_draft, random_sample

from tide_platform.config.schema import Training
from tide_platform.draft.vocab import inverse_map
from tide_platform.training.data import Example, micro_batches, plan_epoch, prepare_all
from tide_platform.training.trainer import LossNotFinite, learning_rate, train


def test_learning_rate_warms_up_then_decays() -> None:
    s = Training(learning_rate=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(i, 100, s) for i in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2, abs=0.01)


def sized(lengths: list[int]) -> list[Example]:
    return [SimpleNamespace(context=n, roots=n // 2) for n in lengths]  # type: ignore[misc]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=90), st.integers(1, 9), st.integers(0, 99))
def test_every_example_once_an_epoch(lengths: list[int], batch: int, seed: int) -> None:
    steps = plan_epoch(sized(lengths), batch, seed)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert all(len(step) <= batch for step in steps)
    assert steps == plan_epoch(sized(lengths), batch, seed)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 3000))
def test_micro_batches_are_bounded_and_whole(lengths: list[int], limit: int) -> None:
    parts = micro_batches(sized(lengths), limit)
    assert sorted(e.context for p in parts for e in p) == sorted(lengths)
    assert all(len(p) == 1 or len(p) * max(e.context for e in p) <= limit for p in parts)


def test_autocast_keeps_to_the_fp32_result() -> None:
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, f"s{i}", 30, 5, 0, 0.0) for i in range(4)]
    results = []
    for autocast in (False, True):
        draft, embed = random_draft(0, draft_vocab=18)
        examples, _ = prepare_all(samples, inverse_map(draft.d2t.numpy(), 20), 3, 100)
        records = train(draft, embed, examples, Training(autocast=autocast, epochs=5, threads=1), 0)
        assert all(p.dtype == torch.float32 for p in draft.parameters())
        results.append(records[-1].loss)
    assert results[0] == pytest.approx(results[1], rel=0.02)


def test_a_loss_that_is_not_finite_names_the_samples() -> None:
    draft, embed = random_draft(0, draft_vocab=18)
    draft.fc.weight.data[0, 0] = math.inf
    samples = [random_sample(np.random.default_rng(0), "bad", 30, 5, 0, 0.0)]
    examples, _ = prepare_all(samples, inverse_map(draft.d2t.numpy(), 20), 3, 100)
    with pytest.raises(LossNotFinite, match="bad"):
        train(draft, embed, examples, Training(threads=1), 0)
