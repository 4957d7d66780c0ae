"""The optimizer loop's parts."""

import math
from collections.abc import Sequence
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
from tide_platform.training.objective import Objective
from tide_platform.training.schedule import learning_rate
from tide_platform.training.trainer import LossNotFinite, accumulate, train
from tide_platform.training.world import Alone, World


def test_learning_rate_warms_up_then_decays() -> None:
    s = Training(learning_rate=1.0, warmup_ratio=0.1, min_lr_ratio=0.2)
    rates = [learning_rate(i, 100, s) for i in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.2, abs=0.01)


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    s = Training(learning_rate=1.0, warmup_ratio=0.1, lr_schedule="constant")
    rates = [learning_rate(i, 100, s) for i in range(100)]
    assert rates[0] == 0.1 and set(rates[9:]) == {1.0}


class Part(Alone):
    """One of two processes that share a step; what it would hear from the other is given."""

    def __init__(self, own: slice, sums: list[list[float]]):
        super().__init__()
        self._own, self._sums = own, iter(sums)

    def share(self, samples: Sequence[int]) -> Sequence[int]:
        return samples[self._own]

    def total(self, values: Sequence[float]) -> list[float]:
        return next(self._sums)


def test_gradients_of_a_shared_step_add_up_to_that_of_one_process() -> None:
    """The seam: with N_j summed over processes, each one's gradient is its part of the whole."""
    draft, embed = random_draft(0, draft_vocab=18)
    samples = [random_sample(np.random.default_rng(i), f"s{i}", 12 + i, 4, 0, 0.0) for i in range(5)]
    examples, _ = prepare_all(samples, inverse_map(draft.d2t.numpy(), 20), 3, 100)
    objective = Objective(draft, embed, autocast=False)

    def gradient(part: list[Example], world: World) -> list[torch.Tensor]:
        draft.zero_grad()
        accumulate(objective, part, Training(), world)
        return [p.grad.clone() for p in draft.parameters() if p.grad is not None]

    whole = gradient(examples, Alone())
    counts = [float(sum(len(e.supervised[j]) for e in examples)) for j in range(3)]
    parts = [
        gradient(list(Part(own, []).share(examples)), Part(own, [counts, [0.0] * 3, [0.0] * 3]))  # type: ignore[arg-type]
        for own in (slice(0, 2), slice(2, None))
    ]
    for a, b, c in zip(whole, *parts, strict=True):
        assert torch.allclose(a, b + c, atol=1e-6)


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
