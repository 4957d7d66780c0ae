"""EAGLE3 draft in plain torch, with the weight names and numerics of SGLang 0.5.14 (models/llama_eagle3.py).

Shapes: B documents, C context positions, R roots, H hidden, F = 3 Ht fused aux width, N attention heads,
M key-value heads, G = N / M, D head size, Vd draft vocabulary. The rows of a batch lie as its
:mod:`~tide_platform.draft.layout` says.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from tide_platform.draft.config import AUX_LAYERS, DraftConfig
from tide_platform.draft.layout import Layout, LeftPadded, Packed
from tide_platform.draft.rope import frequencies, rotate, rotation


class RMSNorm(nn.Module):
    """Root mean square norm, computed in fp32, result in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Projections only: what attends to what is the unroll's business."""

    def __init__(self, c: DraftConfig):
        super().__init__()
        width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, c: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One Llama layer whose attention reads ``[norm(embedding), norm(hidden)]``."""

    def __init__(self, c: DraftConfig):
        super().__init__()
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.mlp = MLP(c)


class Eagle3Draft(nn.Module):
    """The draft's own weights. Embeddings are the target's and come from outside (:class:`TargetParts`)."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    inv_freq: torch.Tensor

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(AUX_LAYERS * config.target_hidden_size, config.hidden_size, bias=False)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(AUX_LAYERS))
            if config.fc_norm
            else None
        )
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        inv_freq, self.rope_scale = frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Rotary frequencies stay fp32 whatever the weights are cast to, as SGLang keeps them: rounded to
        bf16, angles would be off by 0.2 % of position times frequency.
        """
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            c = self.config
            exact, _ = frequencies(c.rope, c.head_dim, c.max_position_embeddings)
            self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def fuse(self, aux_BCF: torch.Tensor) -> torch.Tensor:
        """The target's three aux states of a position -> the draft's hidden state [B, C, H]."""
        dtype = self.fc.weight.dtype
        aux_BCF = aux_BCF.to(dtype)
        if self.fc_norm is not None:
            chunks = aux_BCF.chunk(AUX_LAYERS, -1)
            aux_BCF = torch.cat([norm(x) for norm, x in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(aux_BCF).to(dtype)  # under autocast the residual stays in the masters' fp32

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary ids -> target vocabulary ids, any shape."""
        return draft_ids + self.d2t[draft_ids]


class Unroll:
    """Chains of draft steps, one rooted at each root of a batch.

    Step 0 of the chain at position t reads the target's aux[t] and attends causally to the step-0 keys of
    positions s <= t. Step j > 0 reads the chain's own previous output and attends to those and to the keys of
    its own earlier steps 1..j (the "diagonal" of EAGLE3's training-time test, which is what serving does).
    The rotary position of step j is t + j. The un-normed hidden state is fed forward, as SGLang does, unless
    the config says ``norm_output``.
    """

    def __init__(self, draft: Eagle3Draft, positions_BC: torch.Tensor, key_mask_BC: torch.Tensor, roots: int):
        """Left-padded: roots are the last ``roots`` columns. ``positions_BC`` absolute positions;
        ``key_mask_BC`` false where there is no aux row (padding, holes).
        """
        self._start(draft, LeftPadded(positions_BC, key_mask_BC, roots))

    @classmethod
    def packed(cls, draft: Eagle3Draft, layout: Packed) -> "Unroll":
        """Packed: everything below has B = 1, C = P positions and R = Q roots of the row."""
        unroll = cls.__new__(cls)
        unroll._start(draft, layout)
        return unroll

    def _start(self, draft: Eagle3Draft, layout: Layout) -> None:
        self.draft, self.layout = draft, layout
        # finite, so that a row without any key gives a mean instead of NaN
        self.bias_BRC = torch.zeros(layout.visible_BRC.shape, device=layout.visible_BRC.device)
        self.bias_BRC.masked_fill_(~layout.visible_BRC, -1e30)
        self.keys: list[torch.Tensor] = []  # step 0: [B, M, C, D]; later: [B, M, R, D]
        self.values: list[torch.Tensor] = []

    def first(self, embeds_BCH: torch.Tensor, aux_BCF: torch.Tensor) -> torch.Tensor:
        """Step 0: embeddings of x[t+1] and aux[t] of the whole context -> hidden [B, R, H] of the roots."""
        layout = self.layout
        hidden_BCH = self.draft.fuse(aux_BCF)
        x = self._inputs(embeds_BCH, hidden_BCH)
        self._remember(x, layout.positions, layout.context_rectangle)
        return self._step(layout.roots(x), layout.roots(hidden_BCH), layout.roots(layout.positions))

    def next(self, embeds_BRH: torch.Tensor, hidden_BRH: torch.Tensor) -> torch.Tensor:
        """Step j > 0: embeddings of x[t+1+j] and the previous step's output, roots only -> [B, R, H]."""
        if self.draft.config.norm_output:
            hidden_BRH = self.draft.norm(hidden_BRH)
        positions = self.layout.roots(self.layout.positions) + len(self.keys)
        x = self._inputs(embeds_BRH, hidden_BRH)
        self._remember(x, positions, self.layout.root_rectangle)
        return self._step(x, hidden_BRH, positions)

    def _inputs(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        layer = self.draft.midlayer
        return torch.cat([layer.input_layernorm(embeds).to(hidden.dtype), layer.hidden_norm(hidden)], -1)

    def _remember(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rectangle: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Adds this step's keys and values."""
        attn = self.draft.midlayer.self_attn
        self.keys.append(rectangle(self._rotated(attn.k_proj(x), positions)).transpose(1, 2))
        self.values.append(rectangle(self._heads(attn.v_proj(x))).transpose(1, 2))

    def _step(self, x: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The layer at the roots, over all keys so far."""
        layer, layout = self.draft.midlayer, self.layout
        queries = self._rotated(layer.self_attn.q_proj(x), positions)
        attended = layout.root_rows(self._attend(layout.root_rectangle(queries)))
        hidden = hidden + layer.self_attn.o_proj(attended).to(hidden.dtype)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden)).to(hidden.dtype)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.draft.config.head_dim))

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = rotation(positions, self.draft.inv_freq, self.draft.rope_scale)
        return rotate(self._heads(x), cos[..., None, :], sin[..., None, :])

    def _attend(self, queries_BRND: torch.Tensor) -> torch.Tensor:
        """Attention of the current step's queries -> [B, R, N*D]; softmax in fp32."""
        batch, roots, heads, head_dim = queries_BRND.shape
        groups = self.keys[0].shape[1]
        q_BMGRD = (
            queries_BRND.transpose(1, 2).reshape(batch, groups, heads // groups, roots, head_dim)
            * head_dim**-0.5
        )
        q_flat = q_BMGRD.flatten(2, 3)
        scores = (q_flat @ self.keys[0].transpose(2, 3)).view(batch, groups, heads // groups, roots, -1)
        scores = scores.float() + self.bias_BRC[:, None, None]
        own = [(q_BMGRD * k[:, :, None]).sum(-1, keepdim=True).float() for k in self.keys[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1).to(self.values[0].dtype)
        context = scores.shape[-1]
        out = (weights[..., :context].flatten(2, 3) @ self.values[0]).view(q_BMGRD.shape)
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., context + step, None] * value[:, :, None]
        return (
            out.reshape(batch, heads, roots, head_dim).transpose(1, 2).reshape(batch, roots, heads * head_dim)
        )
