"""Reads a Llama-architecture GGUF file into what Hugging Face loaders read: config, tensors, tokenizer.

The weights are read by ``gguf`` itself rather than by transformers, which marks such a model as quantised and
then refuses to save it. Heavy module (torch, gguf, transformers): import it inside functions.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer

from tide_platform.config import TideError

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFUnreadable(TideError):
    """A GGUF file that is not of the one architecture that is read here."""


def read_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """``config.json`` of the model, from the file's metadata; only ``llama`` is read.

    Raises :class:`GGUFUnreadable`.
    """

    def field(name: str) -> Any:
        found = reader.fields.get(name)
        if found is None:
            raise GGUFUnreadable(f"GGUF: no metadata field {name}")
        return found.contents()

    if field("general.architecture") != "llama":
        raise GGUFUnreadable(f"GGUF: architecture {field('general.architecture')}, only llama is read")
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": field("llama.block_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": float(field("llama.rope.freq_base")),
        "tie_word_embeddings": not any(tensor.name == "output.weight" for tensor in reader.tensors),
        "use_cache": True,
        "vocab_size": field("llama.vocab_size"),
    }


def read_tensors(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names, dequantised and rounded to bf16."""
    tensors = {}
    for tensor in reader.tensors:
        name = _name(tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name.endswith("q_proj.weight"):
            values = _halves_to_front(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = _halves_to_front(values, config["num_key_value_heads"])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return tensors


def save_tokenizer(path: Path, out: Path, eos_token_id: int, pad_token_id: int) -> None:
    """Write the file's tokenizer and chat template to ``out``.

    The end-of-sequence token is set from the model's metadata: as read, the tokenizer of SmolLM2 would name
    ``<|im_start|>`` in its place, and a client that stops there would never stop.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_token_id)
    tokenizer.save_pretrained(out)


def _name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if len(parts) == 1 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.weight"
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{int(parts[1])}.{_LAYER[parts[2]]}.weight"
    raise GGUFUnreadable(f"GGUF: tensor {name} has no place in a Llama model")


def _halves_to_front(values: np.ndarray, heads: int) -> np.ndarray:
    """[heads*D, H]: GGUF interleaves the two halves of a head's rotary dimensions; here they are apart."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
