"""Dense layers on a CPU: weights packed for oneDNN, an fp32 residual stream, rotary embedding in few calls.

Numerics. Weights, KV cache and activations inside a layer have the model's dtype; the residual stream is
fp32. Small Llamas have activations of 2e4 in it, where a bf16 stream loses what the later layers add. It
costs nothing: torch's rms norm is faster in fp32. What leaves the model (aux hidden states, the draft's
carried state) is rounded to the model's dtype, as on a GPU.
"""

from typing import Any, overload

import torch
import torch.nn.functional as F

_DERIVED = "_tide_cpu"  # the attribute of a module that holds what was derived from its weights


def packed_linear(module: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` [rows, in] by the module's ``weight`` [out, in]; the packed copy of it is made at first use."""
    packed = module.__dict__.get(_DERIVED)
    if packed is None:
        packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.data, None)
        module.__dict__[_DERIVED] = packed
    if x.dtype != packed.dtype:
        x = x.to(packed.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def unpack(model: torch.nn.Module) -> None:
    """Drop everything derived from the weights of ``model``; it is made again at the next use."""
    for module in model.modules():
        module.__dict__.pop(_DERIVED, None)


@overload
def rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor: ...
@overload
def rms_norm(
    module: Any,
    x: torch.Tensor,
    residual: torch.Tensor,
    post_residual_addition: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of ``x`` [rows, H], or of ``x`` + ``residual``, which is then returned too, in fp32.

    The sum is normalised unrounded. The result has the dtype of the norm's weight, which is the model's.
    """
    derived = module.__dict__.get(_DERIVED)
    if derived is None:
        derived = module.weight.data.float(), module.weight.dtype, (module.weight.shape[0],)
        module.__dict__[_DERIVED] = derived
    weight, dtype, shape = derived
    if residual is None:
        return F.rms_norm(x.float(), shape, weight, module.variance_epsilon).to(dtype)
    total = x + residual if residual.dtype == torch.float32 else x.float() + residual
    if post_residual_addition is not None:
        total = total + post_residual_addition
    return F.rms_norm(total, shape, weight, module.variance_epsilon).to(dtype), total


def rotate(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding (halves, not pairs) of ``query`` [rows, H*D] and ``key`` [rows, K*D].

    Args:
        cos_sin: [positions, D], fp32, cosines then sines. The product is taken in fp32 and rounded once.
    """
    rows, width = query.shape
    both = _adjacent(query, key).float().view(rows, -1, head_size)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    low, high = both.chunk(2, -1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(query.dtype).view(rows, -1)
    return turned[:, :width], turned[:, width:]


def _adjacent(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Query and key beside each other: as they lie when both are views of a qkv projection, else copied."""
    stride = query.stride(0)
    if (
        query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
        and key.stride(0) == stride
        and key.storage_offset() == query.storage_offset() + query.shape[1]
        and query.stride(1) == key.stride(1) == 1
    ):
        return query.as_strided((query.shape[0], query.shape[1] + key.shape[1]), (stride, 1))
    return torch.cat((query, key), 1)


def install() -> None:
    """Put these layers in the place of SGLang's; what they do not cover stays SGLang's."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    # without sgl_kernel's AMX build MultiPlatformOp calls forward_native, never forward_cpu
    stock_norm, stock_rope = RMSNorm.forward_native, RotaryEmbedding.forward_native
    stock_head, stock_store = LogitsProcessor._compute_lm_head, LogitsProcessor._get_hidden_states_to_store

    def apply(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return packed_linear(layer, x, bias)

    def lm_head(processor: Any, hidden: torch.Tensor, head: Any, bias: torch.Tensor | None = None) -> Any:
        if processor.use_fp32_lm_head or hasattr(head, "apply_lora") or not hasattr(head, "weight"):
            return stock_head(processor, hidden, head, bias)
        return packed_linear(head, hidden)

    def norm(module: Any, x: torch.Tensor, residual: Any = None, post_residual_addition: Any = None) -> Any:
        if module.variance_size_override is not None or module.cast_x_before_out_mul or not module.has_weight:
            return stock_norm(module, x, residual, post_residual_addition)
        if residual is None:
            return rms_norm(module, x)
        return rms_norm(module, x, residual, post_residual_addition)

    def rope(
        module: Any, positions: Any, query: Any, key: Any, offsets: Any = None, fused: Any = None
    ) -> Any:
        plain = module.is_neox_style and module.rotary_dim == module.head_size and offsets is None
        if not plain or fused is not None or query.dim() != 2:
            return stock_rope(module, positions, query, key, offsets, fused)
        cos_sin = module.__dict__.get(_DERIVED)
        if cos_sin is None:
            # SGLang rounds its own table to the model's dtype on a CPU
            cos_sin = module.__dict__[_DERIVED] = module._compute_cos_sin_cache().float()
        return rotate(positions.flatten(), query, key, cos_sin, module.head_size)

    def hidden_states_to_store(processor: Any, hidden: torch.Tensor, *args: Any) -> Any:
        stored = stock_store(processor, hidden, *args)
        return stored if stored is None else stored.to(hidden.dtype)

    UnquantizedLinearMethod.apply = apply
    LogitsProcessor._compute_lm_head = lm_head
    LogitsProcessor._get_hidden_states_to_store = hidden_states_to_store
    RMSNorm.forward_native = norm
    RotaryEmbedding.forward_native = rope
