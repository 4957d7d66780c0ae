"""The draft's chains at every response position of a batch of samples, in one pass a draft step.

Shapes: B samples, C context positions, R roots (the last R of the C), K steps, H hidden, F fused aux width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tide_platform.capture.record import Sample
from tide_platform.draft.eagle3 import Eagle3Draft, Unroll

HEAD_ROWS = 2048  # logits of this many rows exist at a time


@dataclass(frozen=True)
class Chains:
    """A batch of samples, left-padded to C positions, of which the last R can be roots.

    ``truth_BRK[b, r, i]`` is the stored token that draft token i + 1 of the chain at root r is to be, -1
    where none is stored.
    """

    samples: Sequence[Sample]
    unroll: Unroll
    embeds_BCH: torch.Tensor  # of x[t + 1]
    aux_BCF: torch.Tensor
    truth_BRK: np.ndarray
    roots: list[int]  # of each sample

    def each(self, values_BRK: np.ndarray) -> list[np.ndarray]:
        """By sample [its roots, K], the padding taken off."""
        return [values[len(values) - n :] for values, n in zip(values_BRK, self.roots, strict=True)]


def match_chains(
    draft: Eagle3Draft, embed_VH: torch.Tensor, samples: Sequence[Sample], k_max: int
) -> list[np.ndarray]:
    """For each sample bool [R, k_max]: which tokens of the argmax chain at each of its R roots equal the
    stored ones.
    """
    batch = chains(draft, embed_VH, samples, k_max)
    with torch.inference_mode():
        hidden = batch.unroll.first(batch.embeds_BCH, batch.aux_BCF)
        proposed = [_propose(draft, hidden)]
        for _ in range(k_max - 1):
            hidden = batch.unroll.next(F.embedding(proposed[-1], embed_VH), hidden)
            proposed.append(_propose(draft, hidden))
    return batch.each(torch.stack(proposed, -1).numpy() == batch.truth_BRK)


@torch.inference_mode()
def chains(draft: Eagle3Draft, embed_VH: torch.Tensor, samples: Sequence[Sample], k_max: int) -> Chains:
    """What the unroll of a batch of samples starts from."""
    lengths = [s.meta.num_tokens - 2 for s in samples]  # the last root proposes the last token
    counts = [n - first_root(s) for s, n in zip(samples, lengths, strict=True)]
    context, roots = max(lengths), max(counts)
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
        known = np.concatenate([ids, next_token(s)])
        for i in range(k_max):
            tail = known[2 + i : 2 + i + n]
            truth[b, left : left + len(tail), i] = tail
    return Chains(
        samples,
        Unroll(draft, torch.from_numpy(positions), torch.from_numpy(mask), roots),
        F.embedding(torch.from_numpy(tokens), embed_VH),
        torch.from_numpy(aux.view(np.int16)).view(torch.bfloat16),
        truth[:, context - roots :],
        counts,
    )


def _propose(draft: Eagle3Draft, hidden_BRH: torch.Tensor) -> torch.Tensor:
    """The draft's greedy next token at each root: target ids int64 [B, R]."""
    normed = draft.norm(hidden_BRH).flatten(0, 1)
    best = torch.cat([draft.lm_head(rows).argmax(-1) for rows in normed.split(HEAD_ROWS)])
    return draft.target_ids(best).view(hidden_BRH.shape[:2])


def first_root(sample: Sample) -> int:
    """Index of the root of the first round: the prompt's last position, or the first of a later stretch."""
    return max(0, sample.meta.prompt_tokens - 1 - sample.meta.start_pos)


def next_token(sample: Sample) -> np.ndarray:
    """What a greedy request would have said after its last token, [1], where its row was kept; else [0]."""
    meta, positions = sample.meta, sample.tensors["teacher_pos"]
    greedy = meta.temperature == 0 or meta.verify_rule == "greedy"
    changed = {"penalties", "grammar"} & set(meta.flags)  # the teacher's row is the raw one
    last = meta.start_pos + meta.num_tokens - 1
    if greedy and not changed and len(positions) and positions[-1] == last:
        return sample.tensors["teacher_ids"][-1, :1].astype(np.int64)
    return np.empty(0, np.int64)
