"""Rotary embeddings: transformers' numbers for every type, one form for every layout, named refusals.

That SGLang computes the same is a check of tests/contract.
"""

import json
from typing import Any

import pytest
import torch

from tide_platform.draft.config import DraftConfig
from tide_platform.draft.errors import UnsupportedRope
from tide_platform.draft.rope import frequencies, rotation
from tide_platform.draft.rope_config import difference, rope_of, unsupported

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GPT_OSS = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
NO_CONTEXT = {"rope_type": "yarn", "factor": 2.0}  # original: max_position_embeddings
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = 131072
# family, its config.json's rope part (old or new layout), head size
CONFIGS: list[tuple[str, dict[str, Any], int]] = [
    ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_position_embeddings": 512}, 128),
    ("Llama", {"rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 4096}, 64),
    ("Llama", {"rope_scaling": {"type": "linear", "factor": 4}, "max_position_embeddings": 4096}, 64),
    ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128}, 64),
    ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, 64),
    ("Qwen2", {"rope_theta": 1e6, "rope_scaling": OLD_YARN, "max_position_embeddings": LONG}, 128),
    ("Qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6}, "max_position_embeddings": LONG}, 128),
    ("Qwen3", {"rope_theta": 1e6, "rope_scaling": None, "max_position_embeddings": 40960}, 128),
    ("GptOss", {"rope_theta": 150000, "rope_scaling": GPT_OSS, "max_position_embeddings": LONG}, 64),
    ("Llama", {"rope_theta": 1e4, "rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}, 64),
    ("Llama", {"rope_theta": 1e4, "rope_scaling": NO_CONTEXT, "max_position_embeddings": 256}, 64),
]  # fmt: skip


def theirs(family: str, raw: dict[str, Any], head_dim: int) -> tuple[Any, Any]:
    """transformers' config and rotary embedding."""
    import transformers

    folder = {"GptOss": "gpt_oss"}.get(family, family.lower())
    module = getattr(transformers.models, folder)
    shape = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    config = getattr(transformers, f"{family}Config").from_dict(json.loads(json.dumps(raw)) | shape)
    name = f"modeling_{folder}"
    return config, getattr(getattr(module, name), f"{family}RotaryEmbedding")(config)


@pytest.mark.parametrize(("family", "raw", "head_dim"), CONFIGS)
def test_cos_and_sin_are_transformers(family: str, raw: dict[str, Any], head_dim: int) -> None:
    """With yarn's scale; dynamic rope inside and beyond the original length."""
    config, rotary = theirs(family, raw, head_dim)
    rope = rope_of(raw)
    for name, value in config.rope_parameters.items():
        assert name == "type" or rope[name] == value, name
    longest = config.max_position_embeddings
    for length in (longest // 2, longest, longest * 2):
        positions = torch.tensor([0, 1, 7, length // 3, length - 1])
        cos, sin = rotary(torch.zeros(1, 1), positions[None])
        width = cos.shape[-1]  # gpt-oss keeps half: its two halves are the same
        inverse, scale = frequencies(rope, head_dim, longest, length)
        # an angle is position times frequency: relative fp32 rounding of the frequency grows with it
        tolerance = max(1e-4, 4e-7 * length)
        for mine, other in zip(rotation(positions, inverse, scale), (cos, sin), strict=True):
            torch.testing.assert_close(mine[:, :width], other[0], atol=tolerance, rtol=0)
        torch.testing.assert_close(inverse, rotary.inv_freq, rtol=2e-6, atol=0)
        assert scale == pytest.approx(rotary.attention_scaling)


def test_dynamic_rope_of_a_draft_is_the_one_table_that_sglang_serves() -> None:
    rope = rope_of({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert torch.equal(frequencies(rope, 64, 128)[0], frequencies(rope, 64, 128, 256)[0])
    assert not torch.equal(frequencies(rope, 64, 128)[0], frequencies(rope, 64, 128, 128)[0])


BASE = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, GPT_OSS, {"rope_type": "linear", "factor": 2}])
def test_old_and_new_layouts_read_alike_and_survive_export(scaling: dict[str, Any]) -> None:
    new = DraftConfig.from_json(BASE | {"rope_parameters": {**scaling, "rope_theta": 5e5}}, 12)
    kind = {"type" if k == "rope_type" else k: v for k, v in scaling.items()}
    old = DraftConfig.from_json(BASE | {"rope_theta": 5e5, "rope_scaling": kind}, 12)
    assert old == new == DraftConfig.from_json(json.loads(json.dumps(new.to_json())), 12)
    nested = DraftConfig.for_target({"text_config": BASE | {
        "rope_theta": 5e5, "rope_scaling": kind, "num_hidden_layers": 12,
    }}, 9)  # fmt: skip
    assert nested.rope == new.rope


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers() -> None:
    raw = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 7.0}
    raw |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    assert rope_of(raw) == theirs("Llama", raw, 64)[0].rope_parameters


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope"),
    ({"rope_scaling": {"rope_type": "linear"}}, "linear without factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3 without low_freq_factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, "dynamic with alpha"),
    ({"rope_scaling": {**YARN, "attention_factor": 1.0}}, "cos and sin transformers multiplies by 1"),
    ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, "by 1, SGLang by 1.139"),
    ({"rope_scaling": {**YARN, "attn_factor": 2.0}}, "by 1.139, SGLang by 2.277"),
    ({"rope_scaling": {**YARN, "extrapolation_factor": 2.0}}, "extrapolation_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "text"), REFUSED)
def test_what_sglang_would_serve_otherwise_is_refused_by_name(raw: dict[str, Any], text: str) -> None:
    rope = rope_of(raw)
    assert text in (unsupported(rope) or "")
    with pytest.raises(UnsupportedRope, match="give it one of these") as caught:
        frequencies(rope, 64, 2048)
    assert text in caught.value.kind


def test_differences_are_named_by_the_first_parameter_that_counts() -> None:
    def differ(a: dict[str, Any], b: dict[str, Any]) -> Any:
        return difference(rope_of(a), rope_of(b))

    assert differ({"rope_theta": 1e4}, {}) is None
    assert differ({"rope_theta": 1e5}, {}) == ("rope_theta", 1e5, 1e4)
    assert differ({"rope_scaling": YARN}, {}) == ("rope_type", "yarn", "default")
    assert differ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "factor": 8.0}}) == (
        "rope factor",
        4.0,
        8.0,
    )
    assert differ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "truncate": False}}) == (
        "rope truncate", True, False,
    )  # fmt: skip
    assert differ({"rope_scaling": YARN}, {"rope_scaling": {**YARN, "beta_fast": 32}}) is None
