"""Checks of a draft folder before the server pauses for it: where it lies, what it is, what it holds."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import TideError, draft_digest

# settings of a draft that shape its computation; a draft that differs in one of them is another draft family
COMPUTATION = (
    "architectures",
    "model_type",
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "vocab_size",
    "draft_vocab_size",
    "tie_word_embeddings",
    "bias",
    "attention_bias",
    "mlp_bias",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "num_aux_hidden_states",
    "eagle_config",
)
LEGACY = (
    ("midlayer", "layers.0"),
    ("aux_norm_low", "fc_norm.0"),
    ("aux_norm_mid", "fc_norm.1"),
    ("aux_norm_high", "fc_norm.2"),
)
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
VOCABULARY = "d2t"
UNUSED = "t2d"  # SGLang reads d2t alone


class DraftOutsideRoot(TideError):
    """A path that the server may not load from."""

    def __init__(self, path: str, root: Path):
        super().__init__(f"{path}: drafts are loaded from below {root} only; stage it there")
        self.path, self.root = path, root


class DraftChanged(TideError):
    """The files are not the ones that the caller named."""

    def __init__(self, folder: Path, expected: str, found: str):
        super().__init__(f"{folder}: digest {found}, not {expected}; stage the draft again")
        self.folder, self.expected, self.found = folder, expected, found


class DraftIncompatible(TideError):
    """A draft that cannot take the served one's place."""

    def __init__(self, folder: Path, what: str):
        super().__init__(f"{folder}: {what}; serve it by a restart, or export it again")
        self.folder, self.what = folder, what


@dataclass(frozen=True)
class DraftLayout:
    """What a draft folder says it holds: settings of COMPUTATION, each tensor's shape by its present name."""

    folder: Path
    settings: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path) -> "DraftLayout":
        """Reads ``config.json``, the header of ``model.safetensors``. Raises :class:`DraftIncompatible`."""
        try:
            config = json.loads((folder / "config.json").read_text())
            shapes = safetensors_shapes(folder / "model.safetensors")
        except (OSError, ValueError) as error:
            raise DraftIncompatible(folder, f"not a draft folder ({error})") from error
        return cls(
            folder,
            {name: config.get(name) for name in COMPUTATION},
            {tensor_name(name): shape for name, shape in shapes.items()},
        )

    @property
    def borrows_head(self) -> bool:
        """Whether SGLang gives this draft the target's ``lm_head``."""
        return self.settings["draft_vocab_size"] is None

    def ignored(self) -> list[str]:
        """Tensors of the file that a reload must not touch: the server's copies of them are the target's."""
        shared = {EMBEDDING} | ({HEAD} if self.borrows_head else set())
        return sorted(shared & self.tensors.keys())

    def check_replaces(self, served: "DraftLayout") -> None:
        """Raises :class:`DraftIncompatible` unless computation, names and shapes are the served draft's."""
        for name in COMPUTATION:
            if self.settings[name] != served.settings[name]:
                what = f"{name} is {self.settings[name]!r}, the served draft has {served.settings[name]!r}"
                raise DraftIncompatible(self.folder, what)
        mine, theirs = self._own(), served._own()
        if missing := sorted(theirs.keys() - mine.keys()):
            raise DraftIncompatible(self.folder, f"tensors missing: {', '.join(missing)}")
        if unknown := sorted(mine.keys() - theirs.keys()):
            raise DraftIncompatible(self.folder, f"tensors unknown to the served draft: {', '.join(unknown)}")
        for name, shape in mine.items():
            if shape != theirs[name]:
                what = f"{name} has shape {list(shape)}, the served draft's {list(theirs[name])}"
                raise DraftIncompatible(self.folder, what)

    def _own(self) -> dict[str, tuple[int, ...]]:
        drop = {UNUSED, EMBEDDING} | ({HEAD} if self.borrows_head else set())
        return {name: shape for name, shape in self.tensors.items() if name not in drop}


@dataclass(frozen=True)
class CheckedDraft:
    """A draft that passed every check made without the server's tensors."""

    folder: Path
    digest: str
    ignored: list[str]
    stamp: list[int]  # of the weights' file when its digest was taken

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "digest": self.digest,
            "ignored": self.ignored,
            "stamp": self.stamp,
        }


def check_draft(path: str, digest: str, root: Path, served: DraftLayout) -> CheckedDraft:
    """All checks that need no pause; reads every byte of the file, so the load after it finds it in memory.

    Raises :class:`DraftOutsideRoot`, :class:`DraftIncompatible`, :class:`DraftChanged`.
    """
    folder = confined(path, root)
    layout = DraftLayout.read(folder)
    layout.check_replaces(served)
    stamp = file_stamp(folder / "model.safetensors")
    if (found := draft_digest(folder)) != digest:
        raise DraftChanged(folder, digest, found)
    return CheckedDraft(folder, digest, layout.ignored(), stamp)


def confined(path: str, root: Path) -> Path:
    """``path`` with links resolved; raises :class:`DraftOutsideRoot` where that is not below ``root``."""
    real, allowed = Path(path).resolve(), root.resolve()
    if real == allowed or not real.is_relative_to(allowed):
        raise DraftOutsideRoot(path, allowed)
    return real


def file_stamp(path: Path) -> list[int]:
    """Inode, size and time of change: tells whether a file was touched after its digest was taken."""
    stat = path.stat()
    return [stat.st_ino, stat.st_size, stat.st_mtime_ns]


def tensor_name(name: str) -> str:
    """The name that SGLang gives a tensor of a draft's file, without ``model.``."""
    for legacy, present in LEGACY:
        name = name.replace(legacy, present)
    return name.removeprefix("model.")


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a safetensors file by its header alone. Raises OSError, ValueError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length + 8 > size:
            raise ValueError(f"{path.name} is no safetensors file, or is cut short")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if any(entry["data_offsets"][1] + length + 8 > size for entry in header.values()):
        raise ValueError(f"{path.name} is cut short")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}
