"""Attention over SGLang's KV pool by torch's scaled dot product attention, one call a layer for the batch.

SGLang's ``torch_native`` backend makes one a request and layer, and knows neither verify nor draft steps.
Here the slots to gather and the mask are worked out once a forward pass (``Plan``), and each layer gathers
the keys and values of a group of requests in one contiguous read.

Shapes: B requests of a group, T new tokens of each, L length of the longest with its new tokens, H query
heads, K key heads, G = H / K, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tide_platform.engine.cpu.errors import UnsupportedOnCpu

# Up to this many new tokens a request, query heads that share a key head are folded into rows of one
# product: the keys are then read once instead of G times. Above it the G-fold mask costs more than it
# saves.
FOLD_LIMIT = 16


@dataclass(frozen=True)
class Group:
    """Requests that attend together: equal T and similar L."""

    rows: torch.Tensor | None  # rows of the flat batch [B*T], None: all of them, in order
    slots: torch.Tensor  # [B*L], int32; slot 0, which holds nothing, beyond a request's length
    tokens: int  # T
    length: int  # L
    mask: (
        torch.Tensor | None
    )  # additive, [B, 1, T*G or T, L]; None: no key is masked, or the product is causal
    causal: bool


@dataclass(frozen=True)
class Plan:
    """What every layer of one forward pass shares."""

    groups: list[Group]

    @staticmethod
    def build(
        table: torch.Tensor,
        requests: torch.Tensor,
        prefix: Sequence[int],
        tokens: Sequence[int],
        heads_per_key: int,
        dtype: torch.dtype,
    ) -> "Plan":
        """Plan the attention of requests whose ``tokens[b]`` new tokens follow ``prefix[b]`` cached ones.

        Args:
            table: [requests, positions], int32, the KV slot of each position.
            requests: [B], the rows of ``table``.
            heads_per_key: G.
            dtype: of the keys, hence of the mask.
        """
        firsts: list[int] = []
        total = 0
        for count in tokens:
            firsts.append(total)
            total += count
        bundles = bundle(prefix, tokens)
        groups = []
        for members in bundles:
            count = tokens[members[0]]
            rows = None
            if len(bundles) > 1:
                rows = torch.cat([torch.arange(firsts[b], firsts[b] + count) for b in members])
            picked = requests if len(members) == len(tokens) else requests[members]
            groups.append(
                _group(table, picked.long(), [prefix[b] for b in members], count, rows, heads_per_key, dtype)
            )
        return Plan(groups)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
        scale: float,
    ) -> torch.Tensor:
        """Attend from ``query`` [rows, H*D] to ``keys`` and ``values`` [slots, K, D]; gives [rows, H*D]."""
        if len(self.groups) == 1:
            return _attend(self.groups[0], query, keys, values, heads, scale)
        out = torch.empty_like(query)
        for group in self.groups:
            out[group.rows] = _attend(group, query[group.rows], keys, values, heads, scale)
        return out


def bundle(prefix: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Requests to attend together: as many new tokens each, and no length twice another's.

    So padding to the longest never doubles the work. Prompts (many new tokens) go alone: most of them start
    at position 0, where a causal product needs no mask and half of the work.
    """
    lengths = [p + t for p, t in zip(prefix, tokens, strict=True)]
    alike = max(tokens) == min(tokens) and max(lengths) <= 2 * min(lengths) + 64
    if alike and (max(tokens) <= FOLD_LIMIT or len(tokens) == 1):
        return [list(range(len(tokens)))]
    bundles: list[list[int]] = []
    for b in sorted(range(len(tokens)), key=lambda b: (tokens[b], lengths[b])):
        head = bundles[-1][0] if bundles else None
        if (
            head is not None
            and tokens[b] == tokens[head]
            and tokens[b] <= FOLD_LIMIT
            and lengths[b] <= 2 * lengths[head] + 64
        ):
            bundles[-1].append(b)
        else:
            bundles.append([b])
    return bundles


def _group(
    table: torch.Tensor,
    requests: torch.Tensor,
    prefix: Sequence[int],
    tokens: int,
    rows: torch.Tensor | None,
    heads_per_key: int,
    dtype: torch.dtype,
) -> Group:
    length = max(prefix) + tokens
    slots = table[requests, :length]
    columns = torch.arange(length)
    if len(prefix) > 1:
        # whatever stands beyond a request's end may be another's, and 0 * NaN would carry its faults over
        ends = torch.tensor(prefix).unsqueeze(1) + tokens
        slots = slots.masked_fill(columns >= ends, 0)
    slots = slots.flatten()
    if tokens > FOLD_LIMIT and max(prefix) == 0:
        return Group(rows, slots, tokens, length, mask=None, causal=True)
    if tokens == 1 and len(prefix) == 1:
        return Group(rows, slots, tokens, length, mask=None, causal=False)
    last = torch.tensor(prefix).unsqueeze(1) + torch.arange(
        tokens
    )  # [B, T], the last key that each query sees
    if tokens <= FOLD_LIMIT:
        last = last.repeat_interleave(heads_per_key, dim=1)
    hidden = columns > last.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).unsqueeze(1)
    return Group(rows, slots, tokens, length, mask, causal=False)


def gather(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows ``slots`` of ``pool`` [slots, K, D], as [len(slots), K, D].

    Copied as 32-bit words: torch starts its threads by the number of elements, and for the short contexts
    of a small batch starting them takes longer than the copy.
    """
    flat = pool.view(pool.shape[0], -1)
    if flat.element_size() == 2 and flat.shape[1] % 2 == 0:
        flat = flat.view(torch.float32)
    return flat.index_select(0, slots).view(pool.dtype).view(-1, *pool.shape[1:])


def _attend(
    group: Group, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: int, scale: float
) -> torch.Tensor:
    key_heads, size = keys.shape[1:]
    per_key = heads // key_heads
    k = gather(keys, group.slots).view(-1, group.length, key_heads, size).transpose(1, 2)
    v = gather(values, group.slots).view(-1, group.length, key_heads, size).transpose(1, 2)
    if group.tokens <= FOLD_LIMIT:
        q = query.view(-1, group.tokens, key_heads, per_key, size).permute(0, 2, 1, 3, 4)
        q = q.reshape(-1, key_heads, group.tokens * per_key, size)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale)
        out = out.view(-1, key_heads, group.tokens, per_key, size).permute(0, 2, 1, 3, 4)
    else:
        q = query.view(-1, group.tokens, heads, size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask, is_causal=group.causal, scale=scale, enable_gqa=per_key > 1
        ).transpose(1, 2)
    return out.reshape(-1, heads * size)


def _backends() -> tuple[type, type]:
    """The two backend classes, made here because their base is SGLang's."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType

    class BatchedAttention(TorchNativeAttnBackend):
        """SGLang's ``torch_native`` backend, batched, with the verify and draft-extend modes it lacks."""

        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self._plan: Plan | None = None
            self._planned: tuple[Any, list[int], list[int]] | None = None
            config = runner.model_config
            parallel = runner.tp_size
            self._per_key = max(
                1, config.num_attention_heads // parallel // config.get_num_kv_heads(parallel)
            )
            self._dtype = self.token_to_kv_pool.dtype
            self._speculative = runner.server_args.speculative_algorithm is not None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._planned = (forward_batch, *_lengths(forward_batch))

        @property
        def plan(self) -> Plan | None:
            """Of the pass to come; made when it is asked for, because a draft's pass has its own."""
            if self._planned is not None:
                self._plan, self._planned = self.make_plan(*self._planned), None
            return self._plan

        @plan.setter
        def plan(self, plan: Plan | None) -> None:
            self._plan, self._planned = plan, None

        def make_plan(self, forward_batch: Any, prefix: list[int], tokens: list[int]) -> Plan | None:
            if not prefix:
                return None
            table = self.req_to_token_pool.req_to_token
            return Plan.build(
                table, forward_batch.req_pool_indices, prefix, tokens, self._per_key, self._dtype
            )

        def forward(
            self,
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            **kwargs: Any,
        ) -> torch.Tensor:
            if forward_batch.forward_mode.is_idle() or self.plan is None:
                return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
            if not self.covers(layer):
                if self._speculative:
                    raise UnsupportedOnCpu(
                        f"speculation with the attention of layer {layer.layer_id}"
                        " (window, cross attention, logit cap)",
                        "serve this target without a draft",
                    )
                return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            pool = self.token_to_kv_pool
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            if save_kv_cache and k is not None and v is not None:
                where = forward_batch.out_cache_loc.long()
                keys.index_copy_(0, where, k.view(-1, *keys.shape[1:]))
                values.index_copy_(0, where, v.reshape(-1, *values.shape[1:]))
            query = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
            return self.plan.attend(query, keys, values, layer.tp_q_head_num, layer.scaling)

        def covers(self, layer: Any) -> bool:
            """Whether this backend computes the layer's attention itself."""
            return (
                layer.qk_head_dim == layer.v_head_dim
                and layer.sliding_window_size in (None, -1)
                and not layer.is_cross_attention
                and not layer.logit_cap
                and layer.attn_type == AttentionType.DECODER
                and not self.use_sliding_window_kv_pool
            )

    class DraftSteps:
        """A backend for each draft step with a forward pass: step i sees i + 1 tokens past the last round."""

        needs_cpu_seq_lens = True

        def __init__(self, runner: Any, steps: int) -> None:
            # the last draft token needs no forward pass after it
            self.attn_backends = [BatchedAttention(runner) for _ in range(steps - 1)]

        def init_forward_metadata(self, forward_batch: Any) -> None:
            lengths = _cpu_lengths(forward_batch)
            for step, backend in enumerate(self.attn_backends):
                prefix = [length + step for length in lengths]
                backend.plan = backend.make_plan(forward_batch, prefix, [1] * len(prefix))

    return BatchedAttention, DraftSteps


def _cpu_lengths(forward_batch: Any) -> list[int]:
    lengths = forward_batch.seq_lens_cpu
    return (forward_batch.seq_lens if lengths is None else lengths).tolist()


def _lengths(forward_batch: Any) -> tuple[list[int], list[int]]:
    """Cached tokens and new tokens of each request of a target's or draft-extend's forward pass."""
    mode = forward_batch.forward_mode
    if mode.is_idle():
        return [], []
    if mode.is_decode():
        lengths = _cpu_lengths(forward_batch)
        return [length - 1 for length in lengths], [1] * len(lengths)
    if mode.is_target_verify():
        lengths = _cpu_lengths(forward_batch)
        return lengths, [forward_batch.spec_info.draft_token_num] * len(lengths)
    prefix, tokens = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
    prefix = forward_batch.extend_prefix_lens if prefix is None else prefix
    tokens = forward_batch.extend_seq_lens if tokens is None else tokens
    return _as_list(prefix), _as_list(tokens)


def _as_list(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def install() -> None:
    """Serve ``--attention-backend torch_native`` with the batched backend, draft steps included."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    batched, draft_steps = _backends()

    def create_decode_backend(factory: Any) -> Any:
        steps = factory.speculative_num_steps
        return draft_steps(factory.draft_model_runner, steps) if steps > 1 else None

    def create_draft_extend_backend(factory: Any) -> Any:
        return batched(factory.draft_model_runner)

    ATTENTION_BACKENDS["torch_native"] = batched
    DraftBackendFactory.create_decode_backend = create_decode_backend
    DraftBackendFactory.create_draft_extend_backend = create_draft_extend_backend
