"""What a config says of rotary position embedding: read, judged and compared. Pure: no torch.

One form for old and new layouts: ``{"rope_type": ..., "rope_theta": ..., <what the type needs>}``, defaults
filled in, so that two configs that mean the same give the same dict. The layouts, their order of precedence
and the defaults are transformers 5's (configuration_utils, modeling_rope_utils), which SGLang reads configs
with.
"""

import math
from typing import Any

# rope type -> the parameters that decide its numbers, beside rope_theta
FACTORS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate"),
}
_DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_INTEGERS = ("original_max_position_embeddings",)


def rope_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The rotary parameters of a language model's config, in the one form. Never raises: :func:`unsupported`
    says what can't be computed.
    """
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        return {"rope_type": "per layer type", "rope_theta": 0.0}
    kind = rope.pop("type", None)
    kind = rope.setdefault("rope_type", kind or "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = raw.get("rope_theta") or 10000.0
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    if "original_max_position_embeddings" in FACTORS.get(kind, ()):
        rope["original_max_position_embeddings"] = (
            raw.get("original_max_position_embeddings")  # SGLang and transformers prefer it where it stands
            or rope.get("original_max_position_embeddings")
            or raw.get("max_position_embeddings")
        )
    for name in FACTORS.get(kind, ()):
        if rope.get(name) is None and name in _DEFAULTS:
            rope[name] = _DEFAULTS[name]
    return {name: _number(name, value) for name, value in rope.items() if value is not None}


def unsupported(rope: dict[str, Any]) -> str | None:
    """What in :func:`rope_of`'s answer the draft can't compute as SGLang 0.5.14 serves it; None if it can."""
    kind = rope["rope_type"]
    if "mrope_section" in rope:
        return "mrope"
    if kind not in FACTORS:
        return str(kind)
    if missing := [name for name in FACTORS[kind] if name not in rope]:
        return f"{kind} without {', '.join(missing)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"{kind} with partial_rotary_factor {rope['partial_rotary_factor']}"
    if "alpha" in rope:
        return f"{kind} with alpha"  # another formula in SGLang, none in transformers
    if kind == "yarn" and not math.isclose(*yarn_scales(rope), rel_tol=1e-6):
        theirs, served = yarn_scales(rope)
        return f"yarn whose cos and sin transformers multiplies by {theirs:.4g}, SGLang by {served:.4g}"
    if rope.get("extrapolation_factor", 1.0) != 1.0:
        return f"{kind} with extrapolation_factor"  # transformers reads none
    return None


def yarn_scales(rope: dict[str, Any]) -> tuple[float, float]:
    """What transformers and what SGLang 0.5.14 multiply cos and sin by under yarn (Peng et al. 2023, 3.4)."""
    factor = rope["factor"]
    paper = _mscale(factor, 1.0)
    theirs = rope.get("attention_factor")
    if theirs is None:
        mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        theirs = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else paper
    return theirs, paper * rope.get("attn_factor", 1.0)


def difference(rope: dict[str, Any], other: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """The first parameter in which two ropes differ: its name and both values; None if they are the same.

    Of the type's own parameters only: what no type reads decides nothing.
    """
    names = ("rope_type", "rope_theta", *FACTORS.get(rope["rope_type"], ()))
    for name in names:
        ours, theirs = rope.get(name), other.get(name)
        if not _same(ours, theirs):
            return (name if name.startswith("rope_") else f"rope {name}"), ours, theirs
    return None


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(name: str, value: Any) -> Any:
    """Numbers as floats: SGLang 0.5.14 iterates over an integer ``factor`` of linear rope."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return int(value) if name in _INTEGERS else float(value)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b)
    return a == b
