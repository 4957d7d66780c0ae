"""What an EAGLE3 draft's ``config.json`` says, in SGLang's names. Pure: no torch.

Aux layers have two numberings. Here, in samples and in DESIGN.md an id i means *the residual stream entering
layer i* (Hugging Face's ``hidden_states[i]``). In ``config.json`` SGLang expects ``i - 1``, the layer whose
output it is (sglang/srt/models/llama.py: ``layers_to_capture = [val + 1 for val in layer_ids]``).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tide_platform.draft.errors import DraftCorrupt, DraftIncomplete
from tide_platform.draft.rope_config import difference, rope_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
AUX_LAYERS = 3
PROVENANCE = "tide.json"


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """SGLang's choice of the three aux layers: ``(2, N//2, N-3)``; spread evenly where N is too small."""
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if low < middle < high:
        return low, middle, high
    return max(1, num_layers // 4), max(2, num_layers // 2), max(3, num_layers - 1)


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a Hugging Face config (multimodal targets nest it)."""
    return raw.get("text_config") or raw


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder. Raises :class:`DraftIncomplete`, :class:`DraftCorrupt`."""
    path = folder / "config.json"
    if not path.is_file():
        raise DraftIncomplete(folder, ["config.json"], "a model folder holds config.json and *.safetensors")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DraftCorrupt(folder, "config.json", str(error)) from error


@dataclass(frozen=True)
class DraftConfig:
    """Shape of an EAGLE3 draft. H hidden, Ht the target's hidden, V the target's tokens, Vd the draft's."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]  # entry of layer i
    fc_norm: bool = True  # RMS norm of each aux state before fc
    norm_output: bool = False  # SGLang: feed the normed hidden state forward
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    rope_differs: bool = False  # from the target's, on purpose: trained so elsewhere (`--accept-rope`)

    @classmethod
    def from_json(cls, raw: dict[str, Any], target_layers: int | None = None) -> "DraftConfig":
        """From ``config.json``; ``target_layers`` gives the aux ids that SGLang would take where none are
        written.
        """
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        aux = (
            tuple(i + 1 for i in ids)
            if ids
            else default_aux_layer_ids(target_layers)
            if target_layers
            else ()
        )
        return cls(
            hidden_size=hidden,
            target_hidden_size=raw.get("target_hidden_size") or hidden,
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            vocab_size=raw["vocab_size"],
            draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
            aux_layer_ids=aux,
            fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
            norm_output=bool(raw.get("norm_output")),
            rope=rope_of(raw),
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            rope_differs=bool(raw.get("rope_differs")),
        )

    @classmethod
    def for_target(
        cls, raw: dict[str, Any], draft_vocab_size: int, aux_layer_ids: tuple[int, ...] | None = None
    ) -> "DraftConfig":
        """A draft with the layer shape of the target whose ``config.json`` is ``raw``."""
        text = text_config(raw)
        base = cls.from_json(
            text | {"draft_vocab_size": draft_vocab_size, "eagle_config": None, "fc_norm": True}
        )
        ids = aux_layer_ids or default_aux_layer_ids(text["num_hidden_layers"])
        return cls(**(base.__dict__ | {"aux_layer_ids": tuple(ids), "norm_output": False}))

    def to_json(self) -> dict[str, Any]:
        """The ``config.json`` that SGLang and transformers load (old and new rope layout, so that both
        agree).
        """
        plain = {k: v for k, v in self.rope.items() if k not in ("rope_type", "rope_theta")}
        scaling = (
            None if self.rope["rope_type"] == "default" else {"rope_type": self.rope["rope_type"], **plain}
        )
        told = {"rope_differs": True} if self.rope_differs else {}
        return told | {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": self.rms_norm_eps,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": self.rope,
            "rope_theta": self.rope["rope_theta"],
            "rope_scaling": scaling,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.aux_layer_ids],
            },
            "dtype": "bfloat16",
        }

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of ``model.safetensors`` (SGLang: ``midlayer`` is ``layers.0``)."""
        h, i, d = self.hidden_size, self.intermediate_size, self.head_dim
        attn, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, AUX_LAYERS * self.target_hidden_size),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.self_attn.q_proj.weight": (attn, 2 * h),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.o_proj.weight": (h, attn),
            "midlayer.post_attention_layernorm.weight": (h,),
            "midlayer.mlp.gate_proj.weight": (i, h),
            "midlayer.mlp.up_proj.weight": (i, h),
            "midlayer.mlp.down_proj.weight": (h, i),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab_size, h),
            "d2t": (self.draft_vocab_size,),
            "t2d": (self.vocab_size,),
        }
        if self.fc_norm:
            shapes |= {f"fc_norm.{n}.weight": (self.target_hidden_size,) for n in range(AUX_LAYERS)}
        return shapes


def rope_mismatch(config: DraftConfig, target: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """In what the draft's rope differs from that of its target's language model: name, both values; or None.

    Dynamic rope is stretched from the config's maximum, so there that counts too.
    """
    if found := difference(config.rope, rope_of(target)):
        return found
    longest = target.get("max_position_embeddings", config.max_position_embeddings)
    if config.rope["rope_type"] == "dynamic" and config.max_position_embeddings != longest:
        return "rope max_position_embeddings", config.max_position_embeddings, longest
    return None
