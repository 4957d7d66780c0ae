"""Acceptance on stored text under the verify rule ``rejection``.

SGLang 0.5.14 (``--speculative-use-rejection-sampling``; eagle_worker_v2.py, spec_utils.renorm_draft_probs,
reject_sampling.py): each draft token d is *drawn* from the draft's q = softmax(logits / temperature), top-p
and top-k not applied; it is accepted with probability min(1, p(d) / q(d)), where p is the target's softmax at
that temperature, cut to top-k, then to top-p; else a token is drawn from (p - q)+. What is emitted is
distributed as p.

Seen from the stored text: token x is emitted at a step with probability p(x), and emitted *as an accepted
draft token* with q(x) min(1, p(x) / q(x)) = min(q(x), p(x)). So given that x was emitted it was accepted
with probability min(1, q(x) / p(x)), where q is the draft's after the stored tokens before it. A greedy
request has p(x) = 1, and drafts drawn at temperature 1: it accepts with probability q(x).

q is exact. p(x) is exact at temperature 1 without top-p, where top-k is at most K, or where top-p's nucleus
lies within the K stored log-probabilities, and where the last hidden state was stored (``last_hidden``). Else
the mass behind the K stored ones is known, and how it is spread is not: p(x) is bounded (``slack``).
Log-probabilities are stored as float16: p(x) is right to about 0.1 %.

Shapes: R roots, K steps (of q) or stored log-probabilities (of p), M teacher rows, V vocabulary, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tide_platform.capture.record import Sample
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.evaluation.chains import HEAD_ROWS, Chains

_LAST_HIDDEN_ROWS = 64  # whole rows of the vocabulary at a time


@dataclass(frozen=True)
class TargetChances:
    """Log-probability of each stored token as the server drew it.

    ``log_p_T[i]`` is that of the token at absolute position ``start + i``, NaN where no teacher row tells.
    ``slack``: the widest that the bounds on one of them lie apart, in nats; 0 where all are exact.
    """

    start: int
    log_p_T: np.ndarray
    slack: float

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Log-probabilities of the tokens at these absolute positions, NaN outside the text."""
        index = positions - self.start
        inside = (index >= 0) & (index < len(self.log_p_T))
        return np.where(inside, self.log_p_T[np.clip(index, 0, len(self.log_p_T) - 1)], np.nan)


def text_log_probabilities(
    draft: Eagle3Draft, embed_VH: torch.Tensor, batch: Chains, temperatures: Sequence[float]
) -> list[np.ndarray]:
    """For each sample [R, K]: log q of the stored tokens along the chain at each root, which is fed the
    stored tokens; -inf where a token is not in the draft's vocabulary, or none is stored.
    """
    truth_BRK = torch.from_numpy(batch.truth_BRK)
    scale_B = torch.tensor(temperatures, dtype=torch.float32)
    found = []
    with torch.inference_mode():
        hidden = batch.unroll.first(batch.embeds_BCH, batch.aux_BCF)
        for i in range(truth_BRK.shape[2]):
            if i:
                hidden = batch.unroll.next(F.embedding(truth_BRK[..., i - 1].clamp(min=0), embed_VH), hidden)
            found.append(_log_q(draft, hidden, truth_BRK[..., i], scale_B))
    return batch.each(torch.stack(found, -1).numpy())


def _log_q(
    draft: Eagle3Draft, hidden_BRH: torch.Tensor, token_BR: torch.Tensor, scale_B: torch.Tensor
) -> torch.Tensor:
    """float32 [B, R], log q(token) at each sample's temperature."""
    inverse_V = torch.full((len(draft.t2d),), -1)
    inverse_V[draft.target_ids(torch.arange(len(draft.d2t)))] = torch.arange(len(draft.d2t))
    own = inverse_V[token_BR.clamp(min=0)]
    known = (token_BR >= 0) & (own >= 0)
    rows = draft.norm(hidden_BRH).flatten(0, 1)
    own_N, scale_N = own.clamp(min=0).flatten(), scale_B[:, None].expand(token_BR.shape).flatten()
    log_q = [
        (draft.lm_head(part).float() / scale[:, None]).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        for part, ids, scale in zip(
            rows.split(HEAD_ROWS), own_N.split(HEAD_ROWS), scale_N.split(HEAD_ROWS), strict=True
        )
    ]
    return torch.cat(log_q).view(token_BR.shape).masked_fill(~known, -torch.inf)


def target_chances(sample: Sample, target: TargetParts) -> TargetChances:
    """From the sample's teacher rows: ``last_hidden`` where it was stored, else the K log-probabilities."""
    meta, tensors = sample.meta, sample.tensors
    # one more than the text: the token that a greedy request would have said next
    log_p_T = np.full(meta.num_tokens + 1, np.nan)
    index = tensors["teacher_pos"].astype(np.int64) + 1 - meta.start_pos
    if meta.temperature == 0:
        log_p_T[index] = 0.0
        return TargetChances(meta.start_pos, log_p_T, 0.0)
    told = index < meta.num_tokens
    vocabulary = int(target.config["vocab_size"])
    limits = meta.temperature, meta.top_p, meta.top_k
    if "last_hidden" in tensors:
        low, high = _from_last_hidden(sample, target, index, told, limits)
    else:
        logp_MK, token_logp_M = (
            tensors[name][told].astype(np.float64) for name in ("teacher_logp", "token_logp")
        )
        low, high = token_bounds(logp_MK, token_logp_M, vocabulary, *limits)
    log_p_T[index[told]] = (low + high) / 2
    slack = float(np.nanmax(high - low, initial=0.0))
    return TargetChances(meta.start_pos, log_p_T, slack)


def _from_last_hidden(
    sample: Sample, target: TargetParts, index: np.ndarray, told: np.ndarray, limits: tuple[float, float, int]
) -> tuple[np.ndarray, np.ndarray]:
    hidden_MH = torch.from_numpy(sample.tensors["last_hidden"][told].view(np.int16)).view(torch.bfloat16)
    tokens_M = torch.from_numpy(sample.tensors["input_ids"][index[told]].astype(np.int64))
    bounds = []
    for rows, ids in zip(hidden_MH.split(_LAST_HIDDEN_ROWS), tokens_M.split(_LAST_HIDDEN_ROWS), strict=True):
        logp_MV = (rows.float() @ target.lm_head_VH.float().T).log_softmax(-1)
        own_M = logp_MV.gather(1, ids[:, None])[:, 0]
        ordered = logp_MV.sort(-1, descending=True).values
        bounds.append(
            token_bounds(ordered.double().numpy(), own_M.double().numpy(), logp_MV.shape[1], *limits)
        )
    low, high = (np.concatenate(of) for of in zip(*bounds, strict=True)) if bounds else (np.empty(0),) * 2
    return low, high


def token_bounds(
    logp_MK: np.ndarray,
    token_logp_M: np.ndarray,
    vocabulary: int,
    temperature: float,
    top_p: float,
    top_k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of log p(token) after temperature, top-k and top-p, in that order, as SGLang applies them.

    ``logp_MK``: the K largest raw log-probabilities, descending; ``token_logp_M``: the token's own. What is
    behind them sums to 1 - sum(exp(logp)), each at most the K-th: so the sum of its powers 1/temperature is
    largest and smallest where it is spread evenly and where it is heaped, or the reverse (Jensen).
    """
    power = 1 / temperature
    if not 0 < top_k < vocabulary:
        top_k = vocabulary
    kept = min(top_k, logp_MK.shape[1])
    head_MK = power * logp_MK[:, :kept]
    head = np.exp(head_MK).sum(1)
    tails = _tail_powers(logp_MK, vocabulary, top_k, power) if kept < top_k else (np.zeros(len(head)),) * 2
    own = power * token_logp_M
    ends = []
    for tail in tails:
        total = head + tail
        for mass in _nucleus(head_MK, total, top_p):
            ends.append(own - np.log(total * mass))
    return np.minimum(np.min(ends, 0), 0.0), np.minimum(np.max(ends, 0), 0.0)


def _tail_powers(
    logp_MK: np.ndarray, vocabulary: int, top_k: int, power: float
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of sum(p ** power) over the tokens behind the K stored ones that top-k keeps."""
    mass = np.clip(1 - np.exp(logp_MK).sum(1), 0.0, None)
    behind = vocabulary - logp_MK.shape[1]
    even = behind * (mass / behind) ** power
    heaped = mass * np.exp((power - 1) * logp_MK[:, -1])
    least, most = np.minimum(even, heaped), np.maximum(even, heaped)
    return (np.zeros_like(least), most) if top_k < vocabulary else (least, most)


def _nucleus(head_MK: np.ndarray, total_M: np.ndarray, top_p: float) -> tuple[np.ndarray, ...]:
    """Bounds of the mass of the fewest most likely tokens that reach ``top_p``."""
    if top_p >= 1:
        return (np.ones_like(total_M),)
    share_MK = np.exp(head_MK) / total_M[:, None]
    reached_MK = share_MK.cumsum(1)
    inside = reached_MK[:, -1] >= top_p
    first = np.argmax(reached_MK >= top_p, 1)
    at_first = reached_MK[np.arange(len(first)), first]
    low = np.where(inside, at_first, top_p)
    high = np.where(inside, at_first, np.minimum(1.0, top_p + share_MK[:, -1]))
    return low, high


def acceptance_chances(
    log_q_RK: np.ndarray, target: TargetChances, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """``(chance_RK, known_R)``: probability that the stored token was an accepted draft token, and how many
    of each chain's can be told. ``first``: absolute position of root 0, whose chain proposes the token two
    behind it.
    """
    roots, steps = log_q_RK.shape
    positions_RK = first + 2 + np.arange(roots)[:, None] + np.arange(steps)
    log_p_RK = target.at(positions_RK)
    told_RK = ~np.isnan(log_p_RK)
    chance_RK = np.exp(np.minimum(0.0, log_q_RK - np.where(told_RK, log_p_RK, 0.0)))
    return np.where(told_RK, chance_RK, 0.0), np.cumprod(told_RK, 1).sum(1)
