"""Requests that two drafts answer, as counts: for simulations of what the statistics conclude."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Experiments:
    """T trials of N requests each; ``a`` the champion, ``b`` the challenger."""

    tokens_TN: np.ndarray  # said after the first
    rounds_a_TN: np.ndarray
    rounds_b_TN: np.ndarray

    def first(self, trials: int) -> "Experiments":
        return Experiments(self.tokens_TN[:trials], self.rounds_a_TN[:trials], self.rounds_b_TN[:trials])

    def counts(self, trial: int) -> np.ndarray:
        """[N, 4], as :func:`tide_platform.evaluation.statistics.paired_counts` gives them."""
        tokens, a, b = self.tokens_TN[trial], self.rounds_a_TN[trial], self.rounds_b_TN[trial]
        return np.stack([tokens - a, a, tokens - b, b], 1).astype(float)


def experiments(seed: int, trials: int, requests: int, gain: float, k: int = 2) -> Experiments:
    """Requests differ in length (4 to 96 tokens) and in how predictable they are (beta); both drafts meet the
    same ones, each with its own luck at each, round by round. ``gain``: factor on the challenger's acceptance
    rate.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.geometric(1 / 40, (trials, requests)).clip(4, 96)
    easy = rng.beta(6, 8, tokens.shape)
    rounds = []
    for factor in (1.0, gain):
        rate = np.clip(easy * factor * rng.normal(1, 0.1, tokens.shape), 0.01, 0.97)
        rounds.append(_walk(rng, tokens.ravel(), rate.ravel(), k).reshape(tokens.shape))
    return Experiments(tokens, *rounds)


def _walk(rng: np.random.Generator, tokens: np.ndarray, rate: np.ndarray, k: int) -> np.ndarray:
    rounds, going, left = np.zeros(len(tokens), np.int64), np.arange(len(tokens)), tokens.copy()
    while len(going):
        rounds[going] += 1
        hit = rng.random((len(going), k), np.float32) < rate[going, None]
        left = left - 1 - hit.cumprod(-1).sum(-1)
        going, left = going[left > 0], left[left > 0]
    return rounds


def alike_experiments(
    seed: int, trials: int, requests: int, gain: float, alike: float, k: int = 2
) -> Experiments:
    """The same requests, but where in the text a draft is lucky is the text's doing to the share ``alike``: a
    draft and its fine-tune hit and miss the same tokens more often than two drafts of their own.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.geometric(1 / 40, (trials, requests)).clip(4, 96)
    easy = rng.beta(6, 8, tokens.shape)
    luck = rng.random((tokens.size, 96 + k), np.float32)
    other = np.where(rng.random(luck.shape, np.float32) < alike, luck, rng.random(luck.shape, np.float32))
    rounds = []
    for factor, of_draft in ((1.0, luck), (gain, other)):
        rate = np.clip(easy * factor * rng.normal(1, 0.1, tokens.shape), 0.01, 0.97)
        hit = of_draft < rate.reshape(-1, 1)
        rounds.append(_walk_text(tokens.ravel(), hit, k).reshape(tokens.shape))
    return Experiments(tokens, *rounds)


def _walk_text(tokens: np.ndarray, hit: np.ndarray, k: int) -> np.ndarray:
    rounds, at = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.int64)
    going = np.arange(len(tokens))
    while len(going):
        rounds[going] += 1
        ahead = at[going, None] + np.arange(k)
        at[going] += 1 + hit[going[:, None], ahead].cumprod(-1).sum(-1)
        going = going[at[going] < tokens[going]]
    return rounds
