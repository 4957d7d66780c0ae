"""Drafts made by hand, of the architecture that SGLang loads, for tests that need one that hits sometimes."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

VOCABULARY = 8192


def lens_draft(
    target: Path, folder: Path, ids: torch.Tensor | None = None, embed_tokens: bool = False
) -> Path:
    """A draft that reads the next token off the last aux layer and says it again and again.

    It is right where text repeats. ``ids``: its vocabulary, target ids ascending. ``embed_tokens``: the file
    carries (wrong) embeddings, as files of some trainers do.
    """
    config = json.loads((target / "config.json").read_text())
    hidden, ids = config["hidden_size"], torch.arange(VOCABULARY) if ids is None else ids
    tensors = _shapes(config, len(ids))
    with safe_open(target / "model.safetensors", "pt") as file:
        embeddings, norm = file.get_tensor("model.embed_tokens.weight"), file.get_tensor("model.norm.weight")
    tensors["fc.weight"] = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], 1)
    tensors["norm.weight"], tensors["lm_head.weight"] = norm, embeddings[ids]
    if embed_tokens:
        tensors["embed_tokens.weight"] = torch.full_like(embeddings, 0.25)
    return _save(folder, config, tensors, ids)


def random_draft(target: Path, folder: Path, seed: int = 0) -> Path:
    """A draft that never hits."""
    config = json.loads((target / "config.json").read_text())
    torch.manual_seed(seed)
    ids = torch.arange(VOCABULARY)
    tensors = {
        name: value if "norm" in name else torch.randn_like(value) * 0.02
        for name, value in _shapes(config, len(ids)).items()
    }
    return _save(folder, config, tensors, ids)


def _shapes(config: dict, vocabulary: int) -> dict[str, torch.Tensor]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = {"q_proj": (query, 2 * hidden), "k_proj": (key, 2 * hidden), "v_proj": (key, 2 * hidden)}
    linear = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocabulary, hidden),
        "midlayer.self_attn.o_proj": (hidden, query),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    } | {f"midlayer.self_attn.{name}": shape for name, shape in attention.items()}
    layer = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    norms = ["norm", *(f"midlayer.{name}" for name in layer), *(f"fc_norm.{i}" for i in range(3))]
    return {f"{name}.weight": torch.zeros(shape) for name, shape in linear.items()} | {
        f"{name}.weight": torch.ones(hidden) for name in norms
    }


def _save(folder: Path, config: dict, tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in tensors.items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), ids)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    draft = config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": False,
        "fc_norm": True,
    }
    (folder / "config.json").write_text(json.dumps(draft, indent=1))
    return folder
