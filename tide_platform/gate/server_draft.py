"""The draft's forward pass as SGLang computes it, small and on its own: nothing of ``draft/eagle3.py``.

One sample at a time: a prefill over the whole context, then chains of draft steps, each with a key-value
cache of its own, as the server keeps it. fp32.

Shapes: C context positions (0 .. C-1), R roots, h hidden, F fused aux width, N heads, M key-value heads, D
head size, Vd draft vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tide_platform.gate.server_rules import HEAD, LoadedDraft

_LAYER = "model.layers.0"


class ServerDraft:
    """A loaded draft with the target's embeddings. Every parameter must have been loaded."""

    def __init__(self, loaded: LoadedDraft, embed_Vh: torch.Tensor):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = loaded.config
        self._w = {name: tensor.float() for name, tensor in loaded.tensors.items()}
        self._embed_Vh = embed_Vh.float()
        self._eps = config.get("rms_norm_eps", 1e-6)
        self._heads = config["num_attention_heads"]
        self._kv_heads = config.get("num_key_value_heads") or self._heads
        self._size = config.get("head_dim") or config["hidden_size"] // self._heads
        self._norm_output = bool(config.get("norm_output"))
        # SGLang builds the rotary embedding from the same Hugging Face config
        self._rotary = LlamaRotaryEmbedding(LlamaConfig(**_plain(config)))
        assert loaded.hot_ids_D is not None
        self._hot_ids_D = loaded.hot_ids_D

    @torch.inference_mode()
    def prefill(self, tokens_C: torch.Tensor, aux_CF: torch.Tensor) -> "Context":
        """Step 0 at every position: ``tokens_C`` int64, the token *after* each position; ``aux_CF`` its aux
        states.
        """
        length = len(tokens_C)
        cache = _Cache(self._kv_heads, self._size)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        hidden_Ch = self._layer(tokens_C, self._fuse(aux_CF), torch.arange(length), cache, causal)
        return Context(hidden_Ch, cache)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits [..., Vd] of un-normed hidden states [..., h]."""
        return self._norm(hidden, "model.norm.weight") @ self._w[HEAD].T

    @torch.inference_mode()
    def chain(
        self, context: "Context", root: int, steps: int, forced: Sequence[int] | None = None
    ) -> tuple[list[int], torch.Tensor]:
        """The draft steps of the round at ``root``: proposed target ids, and draft logits [steps, Vd].

        ``forced``: target ids that later steps embed, in place of what was proposed (teacher forcing).
        """
        cache = context.cache.upto(root + 1)
        hidden_1h = context.hidden_Ch[root : root + 1]
        proposed: list[int] = []
        rows: list[torch.Tensor] = []
        for step in range(steps):
            if step:
                token = forced[step - 1] if forced else proposed[-1]
                if self._norm_output:
                    hidden_1h = self._norm(hidden_1h, "model.norm.weight")
                position = torch.tensor([root + step])
                hidden_1h = self._layer(torch.tensor([token]), hidden_1h, position, cache, None)
            rows.append(self.logits(hidden_1h)[0])
            proposed.append(int(self._hot_ids_D[rows[-1].argmax()]))
        return proposed, torch.stack(rows)

    def _fuse(self, aux_CF: torch.Tensor) -> torch.Tensor:
        aux_CF = aux_CF.float()
        if "model.fc_norm.0.weight" in self._w:
            chunks = aux_CF.chunk(3, -1)
            aux_CF = torch.cat(
                [self._norm(chunk, f"model.fc_norm.{i}.weight") for i, chunk in enumerate(chunks)], -1
            )
        return F.linear(aux_CF, self._w["model.fc.weight"], self._w.get("model.fc.bias"))

    def _layer(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: "_Cache",
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        w, attention = self._w, f"{_LAYER}.self_attn"
        x = torch.cat([
            self._norm(F.embedding(tokens, self._embed_Vh), f"{_LAYER}.input_layernorm.weight"),
            self._norm(hidden, f"{_LAYER}.hidden_norm.weight"),
        ], -1)  # fmt: skip
        q, k, v = (
            (x @ w[f"{attention}.{part}_proj.weight"].T).view(len(tokens), -1, self._size).transpose(0, 1)
            for part in "qkv"
        )
        cos, sin = self._rotary(x, positions[None])
        cache.add(_turned(k, cos[0], sin[0]), v)
        out = F.scaled_dot_product_attention(
            _turned(q, cos[0], sin[0]), cache.keys, cache.values, attn_mask=mask, enable_gqa=True
        )
        hidden = hidden + out.transpose(0, 1).flatten(1) @ w[f"{attention}.o_proj.weight"].T
        y = self._norm(hidden, f"{_LAYER}.post_attention_layernorm.weight")
        gated = F.silu(y @ w[f"{_LAYER}.mlp.gate_proj.weight"].T) * (y @ w[f"{_LAYER}.mlp.up_proj.weight"].T)
        return hidden + gated @ w[f"{_LAYER}.mlp.down_proj.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name], self._eps)


class Context:
    """What a prefill left: un-normed hidden states [C, h] of step 0, and its keys and values."""

    def __init__(self, hidden_Ch: torch.Tensor, cache: "_Cache"):
        self.hidden_Ch, self.cache = hidden_Ch, cache


class _Cache:
    """Keys and values [M, positions, D]."""

    def __init__(self, kv_heads: int, size: int):
        self.keys = self.values = torch.zeros(kv_heads, 0, size)

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = torch.cat([self.keys, keys], 1)
        self.values = torch.cat([self.values, values], 1)

    def upto(self, positions: int) -> "_Cache":
        cut = _Cache(len(self.keys), self.keys.shape[-1])
        cut.add(self.keys[:, :positions], self.values[:, :positions])
        return cut


def _turned(x_NCD: torch.Tensor, cos_CD: torch.Tensor, sin_CD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves rotated (neox)."""
    first, second = x_NCD.chunk(2, -1)
    return x_NCD * cos_CD + torch.cat([-second, first], -1) * sin_CD


def _plain(config: dict) -> dict:
    """The part of a draft's config that shapes its rotary embedding."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters",
             "rope_theta", "rope_scaling", "max_position_embeddings")  # fmt: skip
    return {name: config[name] for name in names if config.get(name) is not None}
