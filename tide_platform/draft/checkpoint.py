"""Drafts and targets on disk: what SGLang loads is what the trainer saves and reads."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tide_platform.config import draft_digest
from tide_platform.config.files import sync
from tide_platform.draft.config import PROVENANCE, DraftConfig, read_config, text_config
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.errors import BadTensorShape, DraftCorrupt, DraftIncomplete
from tide_platform.draft.vocab import map_digest, to_maps

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def save_draft(folder: Path, draft: Eagle3Draft, provenance: dict[str, Any]) -> str:
    """Writes ``config.json``, ``model.safetensors`` (bf16, map included, no embeddings) and ``tide.json``;
    returns the digest.

    All or nothing: written beside, synced, then renamed; an existing folder of that name is replaced.
    """
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor)
        .detach()
        .cpu()
        .contiguous()
        .clone()
        for name, tensor in draft.state_dict().items()
    }
    return write_draft(folder, draft.config.to_json(), tensors, provenance)


def write_draft(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], provenance: dict[str, Any]
) -> str:
    """The atomic write behind :func:`save_draft`, for tensors that are already in the layout of the files.

    ``tide.json`` gets the digests of content and vocabulary map beside ``provenance``.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    (temporary / WEIGHTS).chmod(0o644)
    digest = draft_digest(temporary)
    told = {"digest": digest, **provenance}
    if "d2t" in tensors:
        told["map_digest"] = map_digest(tensors["d2t"].numpy())
    (temporary / PROVENANCE).write_text(json.dumps(told, indent=2, default=str) + "\n")
    for path in (*temporary.iterdir(), temporary):
        sync(path)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
    sync(folder.parent)
    return digest


def load_draft(
    folder: Path, dtype: torch.dtype = torch.float32, target_layers: int | None = None
) -> Eagle3Draft:
    """The draft of a folder, weights in ``dtype``.

    Raises :class:`DraftIncomplete`, :class:`DraftCorrupt`, :class:`BadTensorShape`.
    """
    draft = Eagle3Draft(DraftConfig.from_json(read_config(folder), target_layers))
    tensors = read_tensors(folder)
    own = draft.state_dict()
    if missing := sorted(set(own) - set(tensors)):
        raise DraftIncomplete(folder, missing, "import the draft with `tide draft import`")
    for name, tensor in own.items():
        if tuple(tensor.shape) != tuple(tensors[name].shape):
            raise BadTensorShape(folder, name, tuple(tensors[name].shape), tuple(tensor.shape))
    draft.load_state_dict({name: tensors[name] for name in own})
    return draft.to(dtype)


def read_tensors(folder: Path, only: set[str] | None = None) -> dict[str, torch.Tensor]:
    """All tensors (or those named) of a folder's ``*.safetensors``, whether sharded or not."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise DraftIncomplete(folder, ["*.safetensors"], "a model folder holds config.json and *.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as file:
                tensors |= {
                    name: file.get_tensor(name) for name in list(file.keys()) if only is None or name in only
                }
        except SafetensorError as error:
            raise DraftCorrupt(folder, shard.name, str(error)) from error
    return tensors


@dataclass(frozen=True)
class TargetParts:
    """What a draft needs of its target. V vocabulary, H hidden size."""

    folder: Path
    config: dict[str, Any]  # of the language model
    embed_VH: torch.Tensor  # bf16, frozen, shared
    lm_head_VH: torch.Tensor  # the same tensor where tied
    norm_H: torch.Tensor
    last_layer: dict[str, torch.Tensor]  # "self_attn.q_proj.weight" -> tensor


def load_target_parts(folder: Path) -> TargetParts:
    """Embeddings, head, final norm and last layer of a Hugging Face folder of a Llama-like target.

    Raises :class:`DraftIncomplete` when the folder lacks one of them.
    """
    config = text_config(read_config(folder))
    last = f"layers.{config['num_hidden_layers'] - 1}."
    found: dict[str, torch.Tensor] = {}
    layer: dict[str, torch.Tensor] = {}
    for name in _names(folder):
        tail = name.removeprefix("language_model.").removeprefix("model.").removeprefix("language_model.")
        if tail in ("embed_tokens.weight", "norm.weight", "lm_head.weight"):
            found[tail] = read_tensors(folder, {name})[name]
        elif tail.startswith(last):
            layer[tail.removeprefix(last)] = read_tensors(folder, {name})[name]
    needed = ["embed_tokens.weight", "norm.weight"]
    if config.get("tie_word_embeddings") is False:  # absent: the family's default, and tied ones leave it out
        needed.append("lm_head.weight")
    missing = [n for n in needed if n not in found] + ([] if layer else [last + "*"])
    if missing:
        raise DraftIncomplete(folder, missing, "is this the folder of a target, whole?")
    embed = found["embed_tokens.weight"]
    return TargetParts(folder, config, embed, found.get("lm_head.weight", embed), found["norm.weight"], layer)


def new_draft(
    target: TargetParts, target_ids: Any, aux_layer_ids: tuple[int, ...] | None = None, seed: int = 0
) -> Eagle3Draft:
    """An untrained draft that starts as "the target's last layer on its high aux state".

    ``target_ids``: ascending distinct target ids [Vd], the draft's vocabulary. The embedding half of the
    attention input and the lower aux states start near nothing; layer, norms and head are the target's own.
    """
    config = DraftConfig.for_target(target.config, len(target_ids), aux_layer_ids)
    torch.manual_seed(seed)
    draft = Eagle3Draft(config)
    d2t, t2d = to_maps(target_ids, config.vocab_size)
    hidden, layer = config.hidden_size, draft.midlayer
    own = dict(layer.named_parameters())
    with torch.no_grad():
        draft.d2t.copy_(torch.from_numpy(d2t))
        draft.t2d.copy_(torch.from_numpy(t2d))
        draft.lm_head.weight.copy_(target.lm_head_VH[torch.from_numpy(target_ids)].float())
        draft.norm.weight.copy_(target.norm_H.float())
        draft.fc.weight.mul_(0.3)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
        for name, weight in target.last_layer.items():
            if name.removeprefix("self_attn.") in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
                own[name][:, :hidden].mul_(0.3)
                own[name][:, hidden:].copy_(weight.float())
            elif name in own and name != "input_layernorm.weight":  # embeddings enter with a norm of ones
                own[name].copy_(weight.float())
        layer.hidden_norm.weight.copy_(target.last_layer["input_layernorm.weight"].float())
    return draft


def _names(folder: Path) -> list[str]:
    names: list[str] = []
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            names += list(file.keys())
    if not names:
        raise DraftIncomplete(folder, ["*.safetensors"], "a model folder holds config.json and *.safetensors")
    return names
