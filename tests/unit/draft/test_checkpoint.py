"""What is saved is what is loaded, and what SGLang's loader rules find."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import AUX_LAYERS, TINY, random_draft, tiny_model, tiny_parts

from tide_platform.config import draft_digest
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.draft.config import default_aux_layer_ids
from tide_platform.draft.errors import DraftCorrupt, DraftIncomplete

# the parameters of SGLang 0.5.14's LlamaForCausalLMEagle3 after its renaming: name -> from which of ours
SGLANG = {
    "model.fc.weight": ["fc.weight"],
    "model.fc_norm.0.weight": ["fc_norm.0.weight"],
    "model.fc_norm.1.weight": ["fc_norm.1.weight"],
    "model.fc_norm.2.weight": ["fc_norm.2.weight"],
    "model.layers.0.hidden_norm.weight": ["midlayer.hidden_norm.weight"],
    "model.layers.0.input_layernorm.weight": ["midlayer.input_layernorm.weight"],
    "model.layers.0.post_attention_layernorm.weight": ["midlayer.post_attention_layernorm.weight"],
    "model.layers.0.self_attn.qkv_proj.weight": [f"midlayer.self_attn.{n}_proj.weight" for n in "qkv"],
    "model.layers.0.self_attn.o_proj.weight": ["midlayer.self_attn.o_proj.weight"],
    "model.layers.0.mlp.gate_up_proj.weight": [
        "midlayer.mlp.gate_proj.weight",
        "midlayer.mlp.up_proj.weight",
    ],
    "model.layers.0.mlp.down_proj.weight": ["midlayer.mlp.down_proj.weight"],
    "model.norm.weight": ["norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}


def test_roundtrip(tmp_path: Path) -> None:
    draft, _ = random_draft(1)
    digest = save_draft(tmp_path / "d", draft, {"window": "w1"})
    again = load_draft(tmp_path / "d")
    assert again.config == draft.config
    for name, tensor in draft.state_dict().items():
        expected = tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        assert torch.equal(again.state_dict()[name], expected), name
    assert (
        digest
        == draft_digest(tmp_path / "d")
        == json.loads((tmp_path / "d" / "tide.json").read_text())["digest"]
    )
    assert save_draft(tmp_path / "e", again, {"window": "w2"}) == digest  # provenance is not content
    again.norm.weight.data[0] += 1
    assert save_draft(tmp_path / "e", again, {}) != digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "e"]  # nothing temporary left


def test_names_are_those_that_sglang_maps(tmp_path: Path) -> None:
    draft, _ = random_draft(1)
    save_draft(tmp_path / "d", draft, {})
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    assert set(tensors) == {n for names in SGLANG.values() for n in names} | {"d2t", "t2d"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["fc_norm"] is True
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # SGLang adds 1


def test_untrained_draft_is_the_targets_last_layer() -> None:
    parts = tiny_parts()
    draft = new_draft(parts, np.arange(64), AUX_LAYERS)
    layer = tiny_model().model.layers[-1]
    hidden = parts.config["hidden_size"]
    assert torch.equal(draft.midlayer.self_attn.q_proj.weight[:, hidden:], layer.self_attn.q_proj.weight)
    assert torch.equal(draft.midlayer.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(draft.midlayer.hidden_norm.weight, layer.input_layernorm.weight)
    assert torch.equal(draft.midlayer.input_layernorm.weight, torch.ones(hidden))
    assert torch.equal(draft.lm_head.weight, parts.lm_head_VH[:64].float())


def test_saved_draft_fits_its_target(tmp_path: Path) -> None:
    save_draft(tmp_path / "d", new_draft(tiny_parts(), np.arange(64), AUX_LAYERS), {})
    assert check_draft(tmp_path / "d", TINY).aux_layer_ids == AUX_LAYERS


@pytest.mark.parametrize("layers", range(4, 100))
def test_default_aux_layers_are_three_layers(layers: int) -> None:
    ids = default_aux_layer_ids(layers)
    assert len(set(ids)) == 3 and all(1 <= i < layers for i in ids) and list(ids) == sorted(ids)
    if layers > 8:
        assert ids == (2, layers // 2, layers - 3)


def test_damage_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_draft(folder, random_draft(1)[0], {})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DraftCorrupt, match=r"model\.safetensors"):
        load_draft(folder)
    weights.unlink()
    with pytest.raises(DraftIncomplete, match="safetensors"):
        load_draft(folder)
    with pytest.raises(DraftIncomplete, match=r"config\.json"):
        load_draft(tmp_path / "nowhere")


def test_rotary_frequencies_stay_exact_when_weights_are_rounded() -> None:
    draft, _ = random_draft(0)
    exact = draft.inv_freq.clone()
    rounded = draft.to(torch.bfloat16)
    assert rounded.fc.weight.dtype == torch.bfloat16
    assert rounded.inv_freq.dtype == torch.float32 and torch.equal(rounded.inv_freq, exact)
