"""The operations of EAGLE's draft and verify steps that SGLang has for GPUs only, in torch, for chains.

Shapes: B requests, N draft tokens including the root (``k`` + 1), S a row of the request-to-slot table.
A chain (``topk`` = 1) needs no tree: node j of a request is position j of its row, its only child is j + 1.
"""

from typing import Any

import torch

from tide_platform.engine.cpu.errors import UnsupportedOnCpu


class Launchable:
    """Gives a function the face of a Triton kernel: ``kernel[grid](...)`` calls it, whatever the grid."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Any:
        return self._function


def build_chain(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill ``positions`` [B*N] and the three ``retrieve_*`` [B, N] tables of a chain, in place.

    ``tree_mask`` is left alone: the attention backend of this package derives the mask from the positions.

    Raises:
        UnsupportedOnCpu: ``topk`` is above 1.
    """
    if topk != 1:
        raise UnsupportedOnCpu(f"--speculative-eagle-topk {topk}", "use --speculative-eagle-topk 1")
    nodes = torch.arange(draft_token_num)
    positions.view(-1, draft_token_num).copy_(seq_lens.unsqueeze(1) + nodes)
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_(nodes + 1)
    retrieve_next_token[:, -1] = -1
    retrieve_next_sibling.fill_(-1)


def verify_chain_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept draft tokens as long as each is what the target predicts from the node before it.

    Args:
        predicts: [B*N], out: the target's token after each node.
        accept_index: [B, N], out: flat indices of the accepted nodes, root first, then -1.
        accept_token_num: [B], out: accepted draft tokens, the root not counted.
        candidates: [B, N], the root and the draft tokens.
        target_predict: [B, N], the target's argmax after each node.
    """
    accepted = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1).sum(1)
    predicts.copy_(target_predict.flatten())
    write_accepted(accept_index, accept_token_num, accepted, candidates.shape[1])
    return predicts, accept_index, accept_token_num


def write_accepted(
    accept_index: torch.Tensor, accept_token_num: torch.Tensor, accepted: torch.Tensor, nodes: int
) -> None:
    """Write ``accepted`` [B], counts of draft tokens, in the two forms that SGLang's verify step reads."""
    depth = torch.arange(accept_index.shape[1])
    flat = torch.arange(accepted.numel()).unsqueeze(1) * nodes + depth
    accept_index.copy_(torch.where(depth <= accepted.unsqueeze(1), flat, -1))
    accept_token_num.copy_(accepted)


def slots(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start: torch.Tensor, count: int
) -> torch.Tensor:
    """KV slots [B*count] of positions start .. start+count-1 of each request."""
    columns = start.long().unsqueeze(1) + torch.arange(count)
    return req_to_token[req_pool_indices.long().unsqueeze(1), columns].flatten()


def verify_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """KV slots [B*N], int64, that the verify step writes."""
    return slots(req_pool_indices, req_to_token, start_offset, draft_token_num).long()


def draft_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    steps: int,
) -> None:
    """Fill ``out_cache_loc`` [B*steps] with the KV slots that the draft steps write."""
    out_cache_loc.copy_(slots(req_pool_indices, req_to_token, seq_lens, topk * steps))


def bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, out: torch.Tensor, stride: int
) -> None:
    """Fill ``out`` [B] with each last accepted token; ``accept_lens`` [B] counts the bonus token."""
    rows = accept_tokens.view(-1, stride)
    out.copy_(rows.gather(1, accept_lens.long().unsqueeze(1) - 1).squeeze(1))


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Enter new slots: each row gets the next end - start of ``out_cache_loc`` at start .. end-1."""
    counts = (end_offset - start_offset).long()
    total = out_cache_loc.numel()
    rows = req_pool_indices.long().repeat_interleave(counts, output_size=total)
    first = counts.cumsum(0) - counts
    offset = (start_offset.long() - first).repeat_interleave(counts, output_size=total)
    req_to_token[rows, torch.arange(total) + offset] = out_cache_loc.to(req_to_token.dtype)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a GPU's housekeeping that a CPU has no use for."""


def install() -> None:
    """Put these operations in the place of SGLang's."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative import eagle_info_v2, eagle_utils, eagle_worker_v2, spec_utils
    from sglang.srt.speculative.triton_ops import cache_locs

    # the draft model calls both when it takes over the target's embeddings (models/llama.py, set_embed)
    torch.cuda.synchronize = _nothing
    torch.cuda.empty_cache = _nothing
    # warms up a Triton kernel that only draft trees (topk > 1) use
    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = _nothing

    eagle_utils.sgl_build_tree_kernel_efficient = build_chain
    eagle_utils.verify_tree_greedy_func = verify_chain_greedy
    replaced = {
        "assign_extend_cache_locs_func": verify_slots,
        "assign_draft_cache_locs_contiguous": Launchable(draft_slots),
        "fill_bonus_tokens": Launchable(bonus_tokens),
        "assign_req_to_token_pool_func": assign_slots,
    }
    # modules that imported a name keep their own reference to it
    for module in (cache_locs, spec_utils, eagle_info_v2, eagle_worker_v2, eagle_utils):
        for name, function in replaced.items():
            if hasattr(module, name):
                setattr(module, name, function)
