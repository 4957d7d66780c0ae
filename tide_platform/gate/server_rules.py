"""A draft folder as SGLang's loader reads it (sglang 0.5.14, ``models/llama_eagle3.py``, ``load_weights``).

That loader says nothing of a tensor whose name it does not know, and leaves a parameter that no tensor names
as it was made: random. So the rules are followed here on the files alone, and both lists are kept.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tide_platform.draft.checkpoint import read_tensors
from tide_platform.engine.draft_file import LEGACY

EMBEDDING = "model.embed_tokens.weight"  # replaced by the target's after loading
HEAD = "lm_head.weight"


@dataclass
class LoadedDraft:
    """What a server would hold after loading a folder. h hidden size, Vd draft vocabulary, V the target's."""

    folder: Path
    config: dict[str, Any]
    # parameter, or part of a stacked one, by SGLang's name: model.layers.0.self_attn.q_proj.weight
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    hot_ids_D: torch.Tensor | None = None  # int64 [Vd] target id of each draft id; None: there was no d2t
    skipped: dict[str, tuple[int, ...]] = field(default_factory=dict)  # tensor of the file -> shape
    unset: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter -> its shape
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(
        default_factory=dict
    )  # found, wanted


def load_as_sglang(folder: Path, config: dict[str, Any], vocab_size: int) -> LoadedDraft:
    """Reads the folder by the server's rules. ``vocab_size``: of the target, for the shared embeddings.

    Raises what :func:`~tide_platform.draft.checkpoint.read_tensors` raises.
    """
    shapes = parameter_shapes(config, vocab_size)
    loaded = LoadedDraft(folder, config)
    for name, tensor in read_tensors(folder).items():
        renamed = name
        for old, new in LEGACY:
            renamed = renamed.replace(old, new)
        if "d2t" in renamed:
            loaded.hot_ids_D = tensor.long() + torch.arange(len(tensor))
            continue
        if "t2d" in renamed:  # SGLang does not read it
            continue
        parameter = _parameter(renamed, shapes)
        if parameter is None:
            loaded.skipped[name] = tuple(tensor.shape)
        elif tuple(tensor.shape) != shapes[parameter]:
            loaded.misshapen[name] = (tuple(tensor.shape), shapes[parameter])
        else:
            loaded.tensors[parameter] = tensor
    loaded.unset = {
        name: shape for name, shape in shapes.items() if name not in loaded.tensors and name != EMBEDDING
    }
    if config.get("draft_vocab_size") is None:
        loaded.unset.pop(HEAD, None)  # the target's is borrowed
    return loaded


def parameter_shapes(config: dict[str, Any], vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the server's parameters, stacked ones by their parts."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    wide = config.get("target_hidden_size") or hidden
    layer, attention = "model.layers.0", "model.layers.0.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (vocab_size, hidden),
        "model.fc.weight": (hidden, 3 * wide),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{attention}.q_proj.weight": (heads * size, 2 * hidden),
        f"{attention}.k_proj.weight": (kv_heads * size, 2 * hidden),
        f"{attention}.v_proj.weight": (kv_heads * size, 2 * hidden),
        f"{attention}.o_proj.weight": (hidden, heads * size),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "model.norm.weight": (hidden,),
        HEAD: (config.get("draft_vocab_size") or vocab_size, hidden),
    }
    if config.get("bias"):
        shapes["model.fc.bias"] = (hidden,)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"model.fc_norm.{number}.weight": (wide,) for number in range(3)}
    return shapes


def trainer_name(parameter: str) -> str:
    """The name of a server's parameter in the trainer's draft (and in ``model.safetensors``)."""
    return parameter.removeprefix("model.").replace("layers.0.", "midlayer.")


def _parameter(name: str, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """The parameter that a tensor of the file goes to, with or without ``model.`` before it; None where
    SGLang passes over it. (It stacks q, k, v and gate, up; a part is taken where the whole would be.)
    """
    return next((known for known in (name, f"model.{name}") if known in shapes), None)
