"""Does this draft fit this target? Answered from ``config.json``, ``tide.json``, the vocabulary map and
safetensors headers: no torch, milliseconds.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.config import target_digest
from tide_platform.draft.config import (
    ARCHITECTURE,
    AUX_LAYERS,
    PROVENANCE,
    DraftConfig,
    read_config,
    rope_mismatch,
    text_config,
)
from tide_platform.draft.errors import (
    BadAuxLayers,
    BadTensorShape,
    BadVocabularyMap,
    DraftCorrupt,
    DraftIncomplete,
    DraftMismatch,
    TooManyLayers,
    UnsupportedRope,
    WrongArchitecture,
)
from tide_platform.draft.rope_config import unsupported
from tide_platform.draft.vocab import map_digest

_MAX_HEADER = 100 << 20
_DTYPES = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_, "U8": np.uint8}


def check_draft(draft_folder: Path, target_folder: Path, parent_folder: Path | None = None) -> DraftConfig:
    """Raises the named error of the first thing that keeps SGLang 0.5.14 from serving this draft rightly.

    ``parent_folder``: the draft it was fine-tuned from, whose vocabulary map it must have kept.
    :class:`DraftIncomplete`, :class:`DraftCorrupt`, :class:`WrongArchitecture`, :class:`TooManyLayers`,
    :class:`DraftMismatch`, :class:`BadAuxLayers`, :class:`UnsupportedRope`, :class:`BadTensorShape`,
    :class:`BadVocabularyMap`.
    Returns the draft's config.
    """
    raw, target = read_config(draft_folder), text_config(read_config(target_folder))
    _check_architecture(draft_folder, raw)
    config = DraftConfig.from_json(raw, target["num_hidden_layers"])
    _check_against_target(draft_folder, target_folder, config, target)
    _check_rope(draft_folder, target_folder, config, target)
    headers = _headers(draft_folder)
    _check_tensors(draft_folder, config, headers)
    d2t = _check_map(draft_folder, config, headers)
    _check_provenance(draft_folder, target_folder, d2t)
    if parent_folder is not None:
        _check_parent(draft_folder, parent_folder, d2t)
    return config


def _check_architecture(folder: Path, raw: dict[str, Any]) -> None:
    names = raw.get("architectures") or ["(none)"]
    if names != [ARCHITECTURE]:
        eagle = any("eagle" in n.lower() and "3" not in n for n in names)
        mend = (
            "EAGLE-1/2 drafts are served with another algorithm; use an EAGLE3 draft"
            if eagle
            else (
                f"set architectures to [{ARCHITECTURE!r}] if it is one, or import it with `tide draft import`"
            )
        )
        raise WrongArchitecture(folder, ", ".join(map(str, names)), mend)
    missing = [
        k for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if k not in raw
    ]
    if missing:
        raise DraftIncomplete(folder, [f"config.json: {k}" for k in missing])
    if raw.get("num_hidden_layers", 1) != 1:
        raise TooManyLayers(folder, raw["num_hidden_layers"])


def _check_against_target(
    folder: Path, target_folder: Path, config: DraftConfig, target: dict[str, Any]
) -> None:
    if config.vocab_size != target["vocab_size"]:
        raise DraftMismatch(folder, target_folder, "vocab_size", config.vocab_size, target["vocab_size"])
    if config.target_hidden_size != target["hidden_size"]:
        raise DraftMismatch(
            folder, target_folder, "hidden_size", config.target_hidden_size, target["hidden_size"]
        )
    if config.hidden_size != target["hidden_size"]:  # the draft embeds with the target's table
        raise DraftMismatch(folder, target_folder, "hidden_size", config.hidden_size, target["hidden_size"])
    layers, ids = target["num_hidden_layers"], config.aux_layer_ids
    if len(set(ids)) != AUX_LAYERS or len(ids) != AUX_LAYERS or not all(1 <= i < layers for i in ids):
        raise BadAuxLayers(folder, ids, layers)


def _check_rope(folder: Path, target_folder: Path, config: DraftConfig, target: dict[str, Any]) -> None:
    """A draft works with the rope that it was trained with. Ours are trained with the target's; one that was
    trained with another elsewhere says so (``rope_differs``); anything else is a damaged config.
    """
    if reason := unsupported(config.rope):
        raise UnsupportedRope(folder, reason)
    if not config.rope_differs and (found := rope_mismatch(config, target)):
        mend = (
            "set config.json to what the draft was trained with; if that is this, "
            "bring it in with `tide draft import --accept-rope`"
        )
        raise DraftMismatch(folder, target_folder, *found, mend)


def _check_tensors(folder: Path, config: DraftConfig, headers: dict[str, "_Entry"]) -> None:
    shapes = config.tensor_shapes()
    if missing := sorted(set(shapes) - set(headers)):
        raise DraftIncomplete(
            folder, missing, "import the draft with `tide draft import`, which completes what it can"
        )
    for name, shape in shapes.items():
        if name not in ("d2t", "t2d") and headers[name].shape != shape:
            raise BadTensorShape(folder, name, headers[name].shape, shape)


def _check_map(folder: Path, config: DraftConfig, headers: dict[str, "_Entry"]) -> np.ndarray:
    """``d2t``, once it describes a map that ``t2d`` agrees with."""
    d2t, t2d = headers["d2t"].read(folder), headers["t2d"].read(folder)
    if d2t.shape != (config.draft_vocab_size,):
        raise BadVocabularyMap(
            folder, f"d2t has length {len(d2t)}, the draft's vocabulary {config.draft_vocab_size}"
        )
    if t2d.shape != (config.vocab_size,):
        raise BadVocabularyMap(
            folder, f"t2d has length {len(t2d)}, the target's vocabulary is {config.vocab_size}"
        )
    ids = d2t.astype(np.int64) + np.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise BadVocabularyMap(
            folder,
            f"d2t leads to target id {ids.min() if ids.min() < 0 else ids.max()}, outside the vocabulary",
        )
    if len(np.unique(ids)) != len(ids):
        raise BadVocabularyMap(folder, "d2t leads two draft ids to one target id")
    if not np.array_equal(np.flatnonzero(t2d), np.sort(ids)):
        raise BadVocabularyMap(folder, "t2d does not mark exactly the ids that d2t leads to")
    return d2t


def _check_provenance(folder: Path, target_folder: Path, d2t: np.ndarray) -> None:
    """``tide.json``, where there is one: the target it was trained for, and the map it was trained with."""
    if not (folder / PROVENANCE).is_file():
        return
    try:
        told = json.loads((folder / PROVENANCE).read_text())
    except ValueError as error:
        raise DraftCorrupt(folder, PROVENANCE, str(error)) from error
    made_for = told.get("target_digest")
    if made_for is not None and made_for != (found := target_digest(target_folder)):
        mend = "use a draft made for this target, or bring it in for this one with `tide draft import`"
        raise DraftMismatch(folder, target_folder, "target_digest", made_for, found, mend)
    map_was = told.get("map_digest")
    if map_was is not None and map_was != (found := map_digest(d2t)):
        raise BadVocabularyMap(folder, f"d2t ({found}) is not the map it was trained with ({map_was})")


def _check_parent(folder: Path, parent_folder: Path, d2t: np.ndarray) -> None:
    headers = _headers(parent_folder)
    if "d2t" not in headers:
        raise DraftIncomplete(parent_folder, ["d2t"])
    if not np.array_equal(d2t, headers["d2t"].read(parent_folder)):
        detail = f"d2t is not that of its parent {parent_folder}: fine-tuning must keep the map"
        raise BadVocabularyMap(folder, detail)


class _Entry:
    """One tensor's place in a safetensors file."""

    def __init__(self, path: Path, base: int, raw: dict[str, Any]):
        self.path, self.dtype, self.shape = path, raw["dtype"], tuple(raw["shape"])
        self.start, self.end = (base + offset for offset in raw["data_offsets"])

    def read(self, folder: Path) -> np.ndarray:
        if self.dtype not in _DTYPES:
            raise BadVocabularyMap(folder, f"stored as {self.dtype}, must be int64 (d2t) and bool (t2d)")
        with self.path.open("rb") as file:
            file.seek(self.start)
            return np.frombuffer(file.read(self.end - self.start), _DTYPES[self.dtype]).reshape(self.shape)


def _headers(folder: Path) -> dict[str, _Entry]:
    """Every tensor of the folder, by the names of :meth:`DraftConfig.tensor_shapes`, from headers alone."""
    entries: dict[str, _Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 0 < length < _MAX_HEADER:
                raise DraftCorrupt(folder, path.name, "not a safetensors header")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise DraftCorrupt(folder, path.name, "its header is cut or damaged") from error
        header.pop("__metadata__", None)
        for name, raw in header.items():
            name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
            entries[name] = _Entry(path, 8 + length, raw)
            if entries[name].end > path.stat().st_size:
                raise DraftCorrupt(folder, path.name, f"ends before tensor {name} does")
    if not entries:
        raise DraftIncomplete(folder, ["model.safetensors"])
    return entries
