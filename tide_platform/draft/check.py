"""Does this draft fit this target? Answered from ``config.json`` and safetensors headers alone: no torch,
milliseconds.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.draft.config import ARCHITECTURE, AUX_LAYERS, DraftConfig, read_config, text_config
from tide_platform.draft.errors import (
    BadAuxLayers,
    BadTensorShape,
    BadVocabularyMap,
    DraftCorrupt,
    DraftIncomplete,
    DraftMismatch,
    TooManyLayers,
    WrongArchitecture,
)

_MAX_HEADER = 100 << 20
_DTYPES = {"I64": np.int64, "I32": np.int32, "BOOL": np.bool_, "U8": np.uint8}


def check_draft(draft_folder: Path, target_folder: Path) -> DraftConfig:
    """Raises the named error of the first thing that keeps SGLang 0.5.14 from serving this draft rightly.

    :class:`DraftIncomplete`, :class:`DraftCorrupt`, :class:`WrongArchitecture`, :class:`TooManyLayers`,
    :class:`DraftMismatch`, :class:`BadAuxLayers`, :class:`BadTensorShape`, :class:`BadVocabularyMap`.
    Returns the draft's config.
    """
    raw, target = read_config(draft_folder), text_config(read_config(target_folder))
    _check_architecture(draft_folder, raw)
    config = DraftConfig.from_json(raw, target["num_hidden_layers"])
    _check_against_target(draft_folder, target_folder, config, target)
    headers = _headers(draft_folder)
    _check_tensors(draft_folder, config, headers)
    _check_map(draft_folder, config, headers)
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


def _check_tensors(folder: Path, config: DraftConfig, headers: dict[str, "_Entry"]) -> None:
    shapes = config.tensor_shapes()
    if missing := sorted(set(shapes) - set(headers)):
        raise DraftIncomplete(
            folder, missing, "import the draft with `tide draft import`, which completes what it can"
        )
    for name, shape in shapes.items():
        if name not in ("d2t", "t2d") and headers[name].shape != shape:
            raise BadTensorShape(folder, name, headers[name].shape, shape)


def _check_map(folder: Path, config: DraftConfig, headers: dict[str, "_Entry"]) -> None:
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
