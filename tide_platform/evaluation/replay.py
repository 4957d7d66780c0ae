"""Acceptance replay (design 4.4): from stored samples alone, the acceptance that a server with this draft
would show.

Every response position is given a chain of the draft's own argmax tokens, in one batched pass. Then the
response is walked as the server walks it: a round at root t accepts a(t) draft tokens and emits a(t) + 1, so
the next root is t + a(t) + 1. Under the rules ``greedy`` and ``target_only`` draft token i is accepted iff it
equals the stored token: exact, because that token was the target's own choice.

Drafts past the end of the stored response can't be judged: they count as not accepted (the server may count
some in a request's last round).
"""

import copy
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from tide_platform.capture.record import Sample
from tide_platform.config import TideError
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft, Unroll
from tide_platform.evaluation.acceptance import (
    RequestReplay,
    acceptance_by_position,
    acceptance_length,
    walk,
)

__all__ = ["acceptance_by_position", "acceptance_length", "replay"]

RULES = ("greedy", "target_only")
_HEAD_ROWS = 2048  # logits of this many rows exist at a time


class UnsupportedVerifyRule(TideError):
    """A sample whose rule the walk does not follow."""

    def __init__(self, sample_id: str, rule: str):
        super().__init__(
            f"sample {sample_id} was verified by {rule!r}; acceptance replay follows {' and '.join(RULES)}"
        )
        self.sample_id, self.rule = sample_id, rule


def replay(
    draft: Eagle3Draft,
    target: TargetParts,
    samples: Iterable[Sample],
    k_max: int,
    batch_positions: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
) -> list[RequestReplay]:
    """What the draft would have accepted in each sample, for every k in 1..``k_max``, in the order given.

    ``batch_positions``: padded positions a pass (memory). ``dtype``: precision of the serving draft.
    Raises :class:`UnsupportedVerifyRule`.
    """
    model = copy.deepcopy(draft).to(dtype).eval()
    embed_VH = target.embed_VH.to(dtype)
    results: list[RequestReplay] = []
    for group in _groups(samples, batch_positions):
        for sample, hit_RK in zip(group, match_chains(model, embed_VH, group, k_max), strict=True):
            results.append(_request(sample, hit_RK, k_max))
    return results


@torch.inference_mode()
def match_chains(
    draft: Eagle3Draft, embed_VH: torch.Tensor, samples: Sequence[Sample], k_max: int
) -> list[np.ndarray]:
    """For each sample bool [R, k_max]: which tokens of the chain at each of its R roots equal the stored
    ones.
    """
    lengths = [s.meta.num_tokens - 2 for s in samples]  # the last root proposes the last token
    firsts = [_first_root(s) for s in samples]
    context, roots = max(lengths), max(n - f for n, f in zip(lengths, firsts, strict=True))
    width = samples[0].tensors["aux"].shape[1]
    aux = np.zeros((len(samples), context, width), np.uint16)
    mask = np.zeros((len(samples), context), bool)
    positions = np.zeros((len(samples), context), np.int64)
    tokens = np.zeros((len(samples), context), np.int64)  # x[t + 1] at column t
    truth = np.full((len(samples), context, k_max), -1, np.int64)  # x[t + 2 + i]
    for b, (s, n) in enumerate(zip(samples, lengths, strict=True)):
        left, ids = context - n, s.tensors["input_ids"]
        at = s.tensors["row_pos"] - s.meta.start_pos
        keep = (at >= 0) & (at < n)
        aux[b, left + at[keep]], mask[b, left + at[keep]] = s.tensors["aux"][keep], True
        positions[b, left:] = s.meta.start_pos + np.arange(n)
        tokens[b, left:] = ids[1 : 1 + n]
        for i in range(k_max):
            tail = ids[2 + i : 2 + i + n]
            truth[b, left : left + len(tail), i] = tail
    unroll = Unroll(draft, torch.from_numpy(positions), torch.from_numpy(mask), roots)
    aux_BCF = torch.from_numpy(aux.view(np.int16)).view(torch.bfloat16)
    hidden = unroll.first(F.embedding(torch.from_numpy(tokens), embed_VH), aux_BCF)
    proposed = [_propose(draft, hidden)]
    for _ in range(k_max - 1):
        hidden = unroll.next(F.embedding(proposed[-1], embed_VH), hidden)
        proposed.append(_propose(draft, hidden))
    match = torch.stack(proposed, -1).numpy() == truth[:, context - roots :]
    return [match[b, roots - (n - f) :] for b, (n, f) in enumerate(zip(lengths, firsts, strict=True))]


def _propose(draft: Eagle3Draft, hidden_BRH: torch.Tensor) -> torch.Tensor:
    """The draft's greedy next token at each root: target ids int64 [B, R]."""
    normed = draft.norm(hidden_BRH).flatten(0, 1)
    best = torch.cat([draft.lm_head(rows).argmax(-1) for rows in normed.split(_HEAD_ROWS)])
    return draft.target_ids(best).view(hidden_BRH.shape[:2])


def _first_root(sample: Sample) -> int:
    """Index of the root of the first round: the prompt's last position, or the first of a later stretch."""
    return max(0, sample.meta.prompt_tokens - 1 - sample.meta.start_pos)


def _request(sample: Sample, match_RK: np.ndarray, k_max: int) -> RequestReplay:
    meta = sample.meta
    captured = np.isin(
        np.arange(len(match_RK)) + _first_root(sample) + meta.start_pos, sample.tensors["row_pos"]
    )
    response = meta.start_pos + meta.num_tokens - max(meta.prompt_tokens, meta.start_pos)
    by_k = {k: walk(match_RK, captured, k) for k in range(1, k_max + 1)}
    return RequestReplay(meta.request_id, meta.sample_id, max(0, response), by_k)


def _groups(samples: Iterable[Sample], batch_positions: int) -> Iterator[list[Sample]]:
    """Consecutive samples with a round to replay, at most ``batch_positions`` padded positions a group."""
    group: list[Sample] = []
    for sample in samples:
        if sample.meta.verify_rule not in RULES:
            raise UnsupportedVerifyRule(sample.meta.sample_id, sample.meta.verify_rule)
        if sample.meta.num_tokens - 2 <= _first_root(sample):
            continue
        longest = max(s.meta.num_tokens for s in [*group, sample])
        if group and longest * (len(group) + 1) > batch_positions:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group
