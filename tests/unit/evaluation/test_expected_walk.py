"""The walk against SGLang's verify rules, enumerated: every text, every draft, every coin.

The toy target and draft give any distribution to the token after any text; the draft's depends on how far
along its chain it is, as a real one's does. V tokens, N of them said after the first.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.evaluation.acceptance import (
    KReplay,
    RequestReplay,
    acceptance_by_position,
    acceptance_length,
    expected_walk,
    walk,
)

V, N = 3, 4
Text = tuple[int, ...]


def distributions(seed: int, sharp: float) -> Callable[..., np.ndarray]:
    """A distribution over V for every key, the same each time."""
    known: dict[tuple[object, ...], np.ndarray] = {}
    rng = np.random.default_rng(seed)

    def of(*key: object) -> np.ndarray:
        if key not in known:
            logits = sharp * rng.normal(size=V)
            known[key] = np.exp(logits) / np.exp(logits).sum()
        return known[key]

    return of


def rejection_rounds(p: Callable, q: Callable, k: int, text: Text = ()) -> Iterator[tuple[float, int, int]]:
    """``(probability, rounds, accepted within the text)`` of every way that SGLang's kernel can go on to N
    tokens: chain_speculative_sampling in reject_sampling.py, in words.
    """
    if len(text) >= N:
        yield 1.0, 0, 0
        return
    for drafts in product(range(V), repeat=k):
        drawn = np.prod([q(text, i, drafts[:i])[d] for i, d in enumerate(drafts)])
        kept = 1.0
        for i, d in enumerate(drafts):
            target, draft = p(text + drafts[:i]), q(text, i, drafts[:i])
            accept = min(1.0, target[d] / draft[d])
            residual = np.clip(target - draft, 0, None)
            if residual.sum() > 0:
                for x in range(V):
                    weight = drawn * kept * (1 - accept) * residual[x] / residual.sum()
                    yield from _after(p, q, k, text, drafts[:i], x, weight)
            kept *= accept
        for x in range(V):
            yield from _after(p, q, k, text, drafts, x, drawn * kept * p(text + drafts)[x])


def _after(
    p: Callable, q: Callable, k: int, text: Text, accepted: Text, last: int, weight: float
) -> Iterator[tuple[float, int, int]]:
    if weight <= 0:
        return
    within = min(len(accepted), N - len(text))
    for chance, rounds, more in rejection_rounds(p, q, k, (text + accepted + (last,))[:N]):
        yield weight * chance, rounds + 1, more + within


def texts(p: Callable) -> Iterator[tuple[float, Text]]:
    for text in product(range(V), repeat=N):
        yield float(np.prod([p(text[:i])[x] for i, x in enumerate(text)])), text


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_rejection_on_stored_text_is_the_kernel_on_average(k: int, seed: int) -> None:
    p, q = distributions(seed, 1.5), distributions(seed + 10, 1.0)
    live = np.zeros(3)
    for chance, rounds, accepted in rejection_rounds(p, q, k):
        live += chance * np.array([1, rounds, accepted])
    assert live[0] == pytest.approx(1)
    replayed = np.zeros(2)
    for chance, text in texts(p):
        chances = np.zeros((N, k))
        for r, i in product(range(N), range(k)):
            if r + i < N:
                target, draft = p(text[: r + i]), q(text[:r], i, text[r : r + i])
                chances[r, i] = min(1.0, draft[text[r + i]] / target[text[r + i]])
        found = expected_walk(chances, np.ones(N, bool), k)
        replayed += chance * np.array([found.rounds, found.accepted])
    assert replayed == pytest.approx(live[1:], abs=1e-9)


def target_only_rounds(
    p: Callable, best: Callable, k: int, text: Text = ()
) -> Iterator[tuple[float, int, int]]:
    """The same of tree_speculative_sampling_target_only with the argmax drafts of ``best``."""
    if len(text) >= N:
        yield 1.0, 0, 0
        return
    drafts: Text = ()
    for i in range(k):
        drafts += (best(text, i, drafts),)
    kept = 1.0
    for i, d in enumerate(drafts):
        target = p(text + drafts[:i]).copy()
        accept, target[d] = target[d], 0.0
        for x in range(V):
            weight = kept * (1 - accept) * target[x] / target.sum()
            yield from _go_on(p, best, k, text, drafts[:i], x, weight)
        kept *= accept
    for x in range(V):
        yield from _go_on(p, best, k, text, drafts, x, kept * p(text + drafts)[x])


def _go_on(
    p: Callable, best: Callable, k: int, text: Text, accepted: Text, last: int, weight: float
) -> Iterator[tuple[float, int, int]]:
    if weight <= 0:
        return
    within = min(len(accepted), N - len(text))
    for chance, rounds, more in target_only_rounds(p, best, k, (text + accepted + (last,))[:N]):
        yield weight * chance, rounds + 1, more + within


@pytest.mark.parametrize("k", [1, 3])
def test_equality_with_sampled_text_is_the_target_only_kernel_on_average(k: int) -> None:
    p, q = distributions(2, 1.5), distributions(3, 1.0)

    def best(*key: object) -> int:
        return int(q(*key).argmax())

    live = np.zeros(2)
    for chance, rounds, accepted in target_only_rounds(p, best, k):
        live += chance * np.array([rounds, accepted])
    replayed = np.zeros(2)
    for chance, text in texts(p):
        match = np.zeros((N, k), bool)
        for r in range(N):
            chain: Text = ()
            for i in range(k):
                chain += (best(text[:r], i, chain),)
                match[r, i] = r + i < N and chain[i] == text[r + i]
        found = walk(match, np.ones(N, bool), k)
        replayed += chance * np.array([found.rounds, found.accepted])
    assert replayed == pytest.approx(live, abs=1e-9)


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 5), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_certain_chances_give_the_walk(seed: int, roots: int, k: int, beyond: int) -> None:
    rng = np.random.default_rng(seed)
    known = np.arange(roots, 0, -1) + beyond
    match = (rng.random((roots, k)) < 0.6) & (np.arange(k) < known[:, None])
    ok = rng.random(roots) < 0.8
    assert expected_walk(match.astype(float), ok, k, known) == walk(match, ok, k, known)


def test_walk() -> None:
    match = np.array([[1, 1], [0, 0], [1, 1], [1, 0], [0, 1]], bool)
    ok = np.ones(5, bool)
    # root 0 accepts 2 -> root 3 accepts 1 -> past the end
    assert walk(match, ok, 2) == KReplay(2, 3, (2, 1), (0, 0))
    assert walk(match, ok, 1) == KReplay(3, 2, (2,), (0,))  # roots 0, 2, 4
    # root 0 was not seen; 1 misses; 2 takes all
    assert walk(match, np.array([0, 1, 1, 1, 1], bool), 2) == KReplay(2, 2, (1, 1), (0, 0))
    assert walk(match[:0], ok[:0], 2) == KReplay(0, 0, (0, 0), (0, 0))


def test_a_round_that_the_text_ends_is_cut() -> None:
    match = np.array([[0, 0, 0], [1, 1, 0]], bool)  # root 1 proposes the last token, and another
    ok = np.ones(2, bool)
    assert walk(match, ok, 3, np.array([3, 2])).cut == (0, 0, 1)
    assert walk(match[:, :2], ok, 2, np.array([3, 2])).cut == (0, 0), "all of its drafts are known"
    assert walk(np.zeros((2, 3), bool), ok, 3).cut == (0, 0, 0), "a miss is a miss"


def test_cut_rounds_are_given_what_the_others_show() -> None:
    """The estimate from texts that end anywhere is that of texts that do not end."""
    rng = np.random.default_rng(0)
    rates, k = np.array([0.8, 0.6, 0.5]), 3

    def replays(tokens: int, count: int) -> list[RequestReplay]:
        found = []
        for _ in range(count):
            match = rng.random((tokens, k)) < rates
            known = np.arange(tokens, 0, -1)
            by_k = {k: walk(match & (np.arange(k) < known[:, None]), np.ones(tokens, bool), k)}
            found.append(RequestReplay("r", "s", tokens, by_k))
        return found

    short, long = replays(6, 4000), replays(6000, 4)
    exact = 1 + np.cumprod(rates).sum()
    assert acceptance_length(long, k) == pytest.approx(exact, abs=0.03)
    assert acceptance_length(short, k) == pytest.approx(exact, abs=0.03)
    assert acceptance_by_position(short, k) == pytest.approx(rates, abs=0.03)
    in_text = 1 + sum(r.by_k[k].accepted for r in short) / sum(r.by_k[k].rounds for r in short)
    assert in_text < exact - 0.1, "counting them as misses reads low"
