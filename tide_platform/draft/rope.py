"""Rotary position embedding as SGLang 0.5.14 and transformers compute it (neox layout: rotated halves).

The formulas are those of transformers/modeling_rope_utils.py and sglang/srt/layers/rotary_embedding. D is
the head size.
"""

import math
from pathlib import Path
from typing import Any

import torch

from tide_platform.draft.errors import UnsupportedRope
from tide_platform.draft.rope_config import unsupported, yarn_scales


def frequencies(
    rope: dict[str, Any], head_dim: int, max_position: int, length: int | None = None
) -> tuple[torch.Tensor, float]:
    """``(inverse frequencies fp32 [D/2], scale of cos and sin)`` of :func:`rope_config.rope_of`'s answer.

    ``max_position``: ``max_position_embeddings`` of the config; ``length``: tokens of the sequence. Only
    dynamic rope reads them: transformers follows the sequence as it grows, SGLang computes one table for
    ``factor`` times the maximum and serves every length with it, so that is what a draft is trained with:
    ``length=None``.
    Raises :class:`UnsupportedRope`.
    """
    if reason := unsupported(rope):
        raise UnsupportedRope(Path("config.json"), reason)
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)
    if kind == "dynamic":
        longest = factor * max_position if length is None else max(length, max_position)
        stretch = factor * longest / max_position - (factor - 1)
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    inv = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "linear":
        inv = inv / factor
    elif kind == "llama3":
        inv = _llama3(inv, rope)
    elif kind == "yarn":
        inv = _yarn(inv, rope, head_dim)
    return inv.float(), yarn_scales(rope)[0] if kind == "yarn" else 1.0


def rotation(
    positions: torch.Tensor, inv_freq_D: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)`` fp32 [..., D] of absolute positions [...], each times ``scale``."""
    angles = positions[..., None].float() * inv_freq_D
    angles = torch.cat([angles, angles], -1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [..., heads, D] by cos, sin [..., 1, D], in fp32; result in x's dtype."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _llama3(inv: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Long waves stretched by ``factor``, short ones kept, a ramp between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inv / rope["factor"] + smooth * inv


def _yarn(inv: torch.Tensor, rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Dimensions that turn often in the original context are kept, slow ones interpolated, a ramp between."""
    context, theta = rope["original_max_position_embeddings"], rope["rope_theta"]

    def dimension(turns: float) -> float:
        """The (fractional) dimension that turns so often in the original context."""
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope["beta_fast"]), dimension(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return inv / rope["factor"] * ramp + inv * (1 - ramp)
