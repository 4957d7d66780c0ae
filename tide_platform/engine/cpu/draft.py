"""The EAGLE3 draft's forward pass on a CPU, without SGLang's way to it.

A draft is one layer: what SGLang does around a forward pass (its runner, copies into graph buffers, the
logits processor) takes as long as the layer itself. Here the layer is called at once. After a verify step
only each request's last accepted row goes on to the attention's query, the MLP and the head; the keys and
values of all rows are written first.

Shapes: R rows, B requests, N rows of each after a verify step (``k`` + 1), F = 3H, V the draft's vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tide_platform.engine.cpu.attention import Plan
from tide_platform.engine.cpu.dense import packed_linear, rms_norm


@dataclass(frozen=True)
class Rows:
    """What one pass is about."""

    tokens: torch.Tensor  # [R]
    hidden: torch.Tensor  # [R, H], the draft's own, or [R, F], the target's aux states
    positions: torch.Tensor  # [R]
    slots: torch.Tensor  # [R], where the KV cache gets them
    last: torch.Tensor | None  # [B], rows whose output is wanted; None: all


def network(
    model: Any, rows: Rows, keys: torch.Tensor, values: torch.Tensor, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, V], fp32, and the state that the next draft step starts from [B, H].

    Args:
        model: SGLang's ``LlamaForCausalLMEagle3`` of one layer. keys, values: [slots, K, D] of its KV pool.
        plan: of one query a request, ``rows.last``, or of each row.
    """
    inner = model.model
    layer = inner.layers[0]
    attention = layer.self_attn
    embeds = F.embedding(rows.tokens, inner.embed_tokens.weight)
    residual = rows.hidden
    if residual.shape[-1] != embeds.shape[-1]:
        if inner.fc_norm is not None:
            parts = residual.chunk(len(inner.fc_norm), -1)
            residual = torch.cat([rms_norm(*pair) for pair in zip(inner.fc_norm, parts, strict=True)], -1)
        residual = packed_linear(inner.fc, residual, inner.fc.bias)
    both = torch.cat((rms_norm(layer.input_layernorm, embeds), rms_norm(layer.hidden_norm, residual)), -1)
    qkv = packed_linear(attention.qkv_proj, both)
    query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], -1)
    query, key = attention.rotary_emb(rows.positions, query, key)
    keys.index_copy_(0, rows.slots, key.view(-1, *keys.shape[1:]))
    values.index_copy_(0, rows.slots, value.reshape(-1, *values.shape[1:]))
    if rows.last is not None:
        query, residual = query[rows.last], residual[rows.last]
    attended = plan.attend(query, keys, values, attention.num_heads, attention.scaling)
    x, residual = rms_norm(
        layer.post_attention_layernorm, packed_linear(attention.o_proj, attended), residual
    )
    gate, up = packed_linear(layer.mlp.gate_up_proj, x).chunk(2, -1)
    x = packed_linear(layer.mlp.down_proj, F.silu(gate) * up)
    x, carried = rms_norm(inner.norm, x, residual)
    logits = packed_linear(model.lm_head, x)
    return logits.float(), (x if inner.norm_output else carried.to(x.dtype))


def spread(values: torch.Tensor, last: torch.Tensor, rows: int) -> torch.Tensor:
    """``values`` [B, n] at rows ``last`` of [rows, n], where SGLang looks for them."""
    return values.new_zeros(rows, values.shape[1]).index_copy_(0, last, values)


def install() -> None:
    """Short-cut the forward passes of draft steps and draft-extend; a prompt's goes SGLang's way."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.model_executor.forward_context import get_attn_backend, has_forward_context
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    stock = ModelRunner.forward

    def covers(runner: Any) -> bool:
        """One plain layer in one process; anything else goes SGLang's way."""
        model = runner.model
        if type(model) is not LlamaForCausalLMEagle3 or runner.tp_size > 1 or len(model.model.layers) != 1:
            return False
        layer = model.model.layers[0]
        linears = (
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )
        attends = getattr(runner.attn_backend, "covers", None)  # None: not this package's backend
        return (
            all(type(linear.quant_method) is UnquantizedLinearMethod for linear in linears)
            and not model.model.is_mrope_enabled
            and layer.self_attn.qkv_proj.bias is None
            and layer.self_attn.o_proj.bias is None
            and attends is not None
            and attends(layer.self_attn.attn)
        )

    def forward(runner: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
        mode = forward_batch.forward_mode
        extends = mode.is_draft_extend_v2()
        if not runner.is_draft_worker or not (extends or mode.is_decode()):
            return stock(runner, forward_batch, *rest, **named)
        short = runner.__dict__.get("_tide_short_cut")
        if short is None:
            short = runner._tide_short_cut = covers(runner)
        if not short:
            return stock(runner, forward_batch, *rest, **named)
        backend = get_attn_backend() if has_forward_context() else runner.attn_backend
        if not extends:
            last, plan = None, backend.plan
        else:
            counts = forward_batch.spec_info.num_accept_tokens
            width = forward_batch.spec_info.num_tokens_per_req
            last = torch.arange(len(counts)) * width + counts - 1
            before = forward_batch.seq_lens_cpu - width
            lengths = (before + counts.to(before.dtype) - 1).tolist()
            plan = backend.make_plan(forward_batch, lengths, [1] * len(lengths))
        rows = Rows(
            forward_batch.input_ids,
            forward_batch.spec_info.hidden_states,
            forward_batch.positions,
            forward_batch.out_cache_loc.long(),
            last,
        )
        pool = backend.token_to_kv_pool
        layer_id = runner.model.model.layers[0].self_attn.attn.layer_id
        logits, carried = network(
            runner.model, rows, pool.get_key_buffer(layer_id), pool.get_value_buffer(layer_id), plan
        )
        if last is not None:
            logits, carried = (spread(values, last, len(rows.tokens)) for values in (logits, carried))
        output = LogitsProcessorOutput(next_token_logits=logits, hidden_states=carried)
        return ModelRunnerOutput(logits_output=output, can_run_graph=False)

    ModelRunner.forward = forward
