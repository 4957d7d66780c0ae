"""Rotary position embedding as SGLang and transformers compute it (neox layout: rotated halves)."""

import math
from pathlib import Path
from typing import Any

import torch

from tide_platform.draft.errors import UnsupportedRope


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """fp32 [D/2]. Types default, linear and llama3 (transformers/modeling_rope_utils.py); else refused."""
    inv = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = rope["rope_type"]
    if kind == "linear":
        inv = inv / rope["factor"]
    elif kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        context = rope["original_max_position_embeddings"]
        smooth = ((context * inv / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        inv = (1 - smooth) * inv / rope["factor"] + smooth * inv
    elif kind != "default":
        raise UnsupportedRope(Path("config.json"), kind)
    return inv.float()


def rotation(positions: torch.Tensor, inv_freq_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(cos, sin)`` fp32 [..., D] of absolute positions [...]."""
    angles = positions[..., None].float() * inv_freq_D
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [..., heads, D] by cos, sin [..., 1, D], in fp32; result in x's dtype."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
