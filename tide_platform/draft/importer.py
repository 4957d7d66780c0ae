"""Brings in a draft that another trainer made: SpecForge, EAGLE or speculators layout -> the one that SGLang
loads.

What can be completed without guessing is completed and said (``ImportReport.repairs``); everything else is
refused by name. Weights are never retrained, renumbered or rescaled.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tide_platform.config import target_digest
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import TargetParts, load_target_parts, read_tensors, write_draft
from tide_platform.draft.config import ARCHITECTURE, DraftConfig, read_config, rope_mismatch, text_config
from tide_platform.draft.errors import (
    BadVocabularyMap,
    DraftError,
    DraftIncomplete,
    DraftMismatch,
    TooManyLayers,
    WrongArchitecture,
)
from tide_platform.draft.vocab import to_maps

_PREFIXES = ("draft_model.", "model.")
_RENAMED = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_EAGLE3_NAMES = (
    ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLM",
)


class UnsupportedDraft(DraftError):
    """The draft computes something that SGLang 0.5.14's EAGLE3 does not."""

    def __init__(self, folder: Path, feature: str):
        super().__init__(
            folder, f"{feature}, which SGLang 0.5.14 does not compute for EAGLE3; train a draft without it"
        )
        self.feature = feature


@dataclass(frozen=True)
class ImportReport:
    digest: str
    layout: str  # specforge (also EAGLE's own) | speculators
    repairs: tuple[str, ...]  # what was completed
    warnings: tuple[str, ...]  # what may cost acceptance


def import_draft(folder: Path, target_folder: Path, out: Path, accept_rope: bool = False) -> ImportReport:
    """Reads the draft in ``folder``, completes it, writes it to ``out`` and checks it against the target.

    ``accept_rope``: its rope differs from the target's because it was trained so; written to its
    ``config.json``, which its fine-tuned descendants inherit, as ``rope_differs``.
    Raises the errors of :func:`~tide_platform.draft.check.check_draft` and :class:`UnsupportedDraft`.
    """
    raw = read_config(folder)
    target = load_target_parts(target_folder)
    speculators = "speculators_model_type" in raw or "transformer_layer_config" in raw
    raw = _from_speculators(folder, raw) if speculators else _plain(folder, raw, target)
    rope_differs = _check_rope(folder, target_folder, raw, target, accept_rope)
    tensors = {_rename(name): tensor for name, tensor in _read(folder).items()}
    repairs: list[str] = []
    if tensors.pop("embed_tokens.weight", None) is not None:
        repairs.append("embed_tokens left out: the server shares the target's")
    _complete_map(folder, raw, tensors, repairs)
    _complete_head(folder, raw, tensors, target, repairs)
    raw["fc_norm"] = "fc_norm.0.weight" in tensors
    config = DraftConfig.from_json(raw, target.config["num_hidden_layers"])
    config = replace(config, rope_differs=rope_differs)
    shapes = config.tensor_shapes()
    if unknown := sorted(set(tensors) - set(shapes)):
        repairs.append(f"left out, not part of an EAGLE3 draft: {', '.join(unknown)}")
    layout = "speculators" if speculators else "specforge"
    digest = write_draft(
        out,
        config.to_json(),
        {n: _stored(n, tensors[n]) for n in shapes if n in tensors},
        {
            "made_by": "tide draft import",
            "target_digest": target_digest(target_folder),
            "layout": layout,
            "repairs": repairs,
        },
    )
    check_draft(out, target_folder)
    warnings = []
    if rope_differs:
        warnings.append(f"rope {config.rope} differs from the target's: right only if it was trained so")
    return ImportReport(digest, layout, tuple(repairs), tuple(warnings))


def _check_rope(
    folder: Path, target_folder: Path, raw: dict[str, Any], target: TargetParts, accepted: bool
) -> bool:
    """Whether the draft's rope differs from the target's; :class:`DraftMismatch` where that is not
    accepted.
    """
    config = DraftConfig.from_json(raw, target.config["num_hidden_layers"])
    found = rope_mismatch(config, target.config)
    if found and not accepted:
        mend = "if the draft was trained so, import it with --accept-rope; else use one made for this target"
        raise DraftMismatch(folder, target_folder, *found, mend)
    return found is not None


def _plain(folder: Path, raw: dict[str, Any], target: TargetParts) -> dict[str, Any]:
    names = raw.get("architectures") or []
    if not any(n in _EAGLE3_NAMES for n in names) or (
        names == ["LlamaForCausalLM"] and "draft_vocab_size" not in raw
    ):
        raise WrongArchitecture(folder, ", ".join(names) or "(none)", "use an EAGLE3 draft of this target")
    if raw.get("num_hidden_layers", 1) != 1:
        raise TooManyLayers(folder, raw["num_hidden_layers"])
    return dict(raw) | {"target_hidden_size": raw.get("target_hidden_size") or target.config["hidden_size"]}


def _from_speculators(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """vLLM's speculators nest the layer's config; their aux layer ids are entries of layers, as here."""
    if raw.get("speculators_model_type", "eagle3") != "eagle3":
        raise WrongArchitecture(folder, raw["speculators_model_type"], "use an EAGLE3 draft of this target")
    if raw.get("norm_before_residual"):
        raise UnsupportedDraft(folder, "norm_before_residual is true")
    layer = dict(raw.get("transformer_layer_config") or {})
    if layer.get("num_hidden_layers", 1) != 1:
        raise TooManyLayers(folder, layer["num_hidden_layers"])
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    layer["draft_vocab_size"] = raw.get("draft_vocab_size")
    layer["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]} if ids else None
    if raw.get("target_hidden_size"):
        layer["target_hidden_size"] = raw["target_hidden_size"]
    return text_config(layer)


def _read(folder: Path) -> dict[str, torch.Tensor]:
    binary = folder / "pytorch_model.bin"
    if binary.is_file() and not list(folder.glob("*.safetensors")):
        # EAGLE's own releases; weights_only refuses everything but tensors
        return torch.load(binary, map_location="cpu", weights_only=True)
    return read_tensors(folder)


def _rename(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


def _complete_map(
    folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor], repairs: list[str]
) -> None:
    vocab = raw["vocab_size"]
    if "d2t" not in tensors:
        size = raw.get("draft_vocab_size") or (
            len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocab
        )
        if size != vocab:
            mend = f"which {size} of {vocab} tokens it proposes can't be guessed; export it with its map"
            raise DraftIncomplete(folder, ["d2t"], mend)
        tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
        repairs.append("d2t added: the draft's vocabulary is the target's")
    size = len(tensors["d2t"])
    ids = (tensors["d2t"].long() + torch.arange(size)).numpy()
    if ids.min() < 0 or ids.max() >= vocab:
        raise BadVocabularyMap(
            folder, f"d2t leads outside the target's {vocab} tokens (is it ids instead of offsets?)"
        )
    if "t2d" not in tensors:
        tensors["t2d"] = torch.from_numpy(to_maps(ids, vocab)[1])
        repairs.append("t2d added from d2t")
    raw["draft_vocab_size"] = size


def _complete_head(
    folder: Path,
    raw: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target: TargetParts,
    repairs: list[str],
) -> None:
    if "lm_head.weight" in tensors:
        return
    if target.lm_head_VH.shape[1] != raw["hidden_size"]:
        raise DraftIncomplete(
            folder, ["lm_head.weight"], "the target's head has another width; export the draft with its own"
        )
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    tensors["lm_head.weight"] = target.lm_head_VH[ids]
    repairs.append("lm_head added: the draft borrowed the target's head")


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name == "d2t":
        return tensor.long().contiguous()
    if name == "t2d":
        return tensor.bool().contiguous()
    return tensor.to(torch.bfloat16).contiguous()
