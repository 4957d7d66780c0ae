"""Speculative sampling at temperature > 0 for chains: SGLang's ``target_only`` rule in torch.

A draft token is accepted with the probability that the target gives it; otherwise the target is sampled
with that token taken out. What comes out is distributed as the target alone would have it, whatever the
draft proposes. The functions have the names and arguments of ``sgl_kernel``'s, which SGLang's verify step
imports and of which there is no build for CPUs.

Shapes: B requests, N nodes of a chain (root and draft tokens), R = B*N rows, V the vocabulary.
"""

import importlib.machinery
import sys
import types
from typing import Any

import torch

from tide_platform.engine.cpu.speculative_ops import write_accepted

# how many of the most likely tokens are tried before a row is sorted whole; a sort of 49 k takes
# milliseconds
_HEAD = 1024


def top_k_renorm_prob(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keep the ``top_k`` [R] most likely tokens of each row of ``probs`` [R, V], scaled to sum 1."""
    vocabulary = probs.shape[-1]
    limited = top_k < vocabulary
    if not bool(limited.any()):
        return probs
    out = probs.clone()
    wanted = top_k.clamp(min=1)
    one = limited & (wanted == 1)
    if bool(one.any()):
        # the index that a greedy batch would take: ties must not depend on the request's neighbours
        best = probs[one].argmax(-1, keepdim=True)
        out[one] = torch.zeros_like(probs[one]).scatter_(1, best, 1.0)
    several = limited & ~one
    if bool(several.any()):
        rows, counts = probs[several], wanted[several]
        values, indices = rows.topk(int(counts.max()), dim=-1)
        values = values.masked_fill(torch.arange(values.shape[1]) >= counts.unsqueeze(1), 0.0)
        kept = torch.zeros_like(rows).scatter_(1, indices, values)
        out[several] = kept / kept.sum(-1, keepdim=True)
    return out


def top_p_renorm_prob(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest most likely tokens whose mass reaches ``top_p`` [R], scaled to sum 1."""
    limited = top_p < 1.0
    if not bool(limited.any()):
        return probs
    rows, mass = probs[limited], top_p[limited].unsqueeze(1)
    values, indices = rows.topk(min(_HEAD, rows.shape[-1]), dim=-1)
    if bool((values.sum(-1, keepdim=True) < mass).any()):
        values, indices = rows.sort(dim=-1, descending=True)
    before = values.cumsum(-1) - values
    values = values.masked_fill(before >= mass, 0.0)
    kept = torch.zeros_like(rows).scatter_(1, indices, values)
    out = probs.clone()
    out[limited] = kept / kept.sum(-1, keepdim=True)
    return out


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept draft tokens by the target's probabilities, then sample the token that follows them.

    Args:
        predicts: [B*N], int32, out: the emitted token after each accepted node; others are left as they
        are. accept_index: [B, N], out: flat indices of the accepted nodes, root first, then -1.
        accept_token_num: [B], out: accepted draft tokens, the root not counted. candidates: [B, N], the
        root and the draft tokens. uniform_samples: [B, N], a coin for each draft token, in [0, 1).
        uniform_samples_for_final_sampling: [B], in [0, 1). target_probs: [B, N, V], the target's
        distribution after each node. threshold_single, threshold_acc: SGLang's accept thresholds; below 1
        they accept more, and lossily.
    """
    batch, nodes = candidates.shape
    drafts = candidates[:, 1:].long()
    chance = target_probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)  # [B, N-1]
    hit = (uniform_samples[:, : nodes - 1] < chance / threshold_acc) | (chance >= threshold_single)
    accepted = hit.int().cumprod(1).sum(1)

    row = torch.arange(batch)
    final = target_probs[row, accepted].double()  # [B, V]
    refused = (accepted < nodes - 1).nonzero().squeeze(1)
    token = drafts[refused, accepted[refused]]
    kept = final[refused, token]
    final[refused, token] = 0.0
    # a token of probability 1 - 1e-8 was refused by rounding: nothing else is left to emit
    empty = final[refused].sum(-1) <= 0
    final[refused[empty], token[empty]] = kept[empty]

    cumulative = final.cumsum(-1)
    point = uniform_samples_for_final_sampling.double() * cumulative[:, -1]
    last = torch.searchsorted(cumulative, point.unsqueeze(1), right=True).squeeze(1)
    # an inexact product may reach the total: the last token that has any mass
    last = torch.minimum(last, (cumulative >= cumulative[:, -1:]).int().argmax(-1))

    emitted = predicts.view(batch, nodes)
    emitted[:, :-1] = torch.where(torch.arange(nodes - 1) < accepted.unsqueeze(1), drafts, emitted[:, :-1])
    emitted[row, accepted] = last.to(predicts.dtype)
    write_accepted(accept_index, accept_token_num, accepted, nodes)


def install() -> None:
    """Stand in for ``sgl_kernel``, of which there is no build for CPUs, with these three functions only."""
    name = "sgl_kernel"
    if name in sys.modules:
        return
    module: Any = types.ModuleType(name, "Torch stand-in for a CPU, by tide_platform.engine.cpu.sampling")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    module.top_k_renorm_prob = top_k_renorm_prob
    module.top_p_renorm_prob = top_p_renorm_prob
    module.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only
    sys.modules[name] = module
