"""What a folder must hold to be served as a target. Reads JSON and safetensors headers only."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import TideError, target_digest


class TargetUnusable(TideError):
    """A folder that cannot be served as a target."""

    def __init__(self, folder: Path, problem: str):
        super().__init__(f"target {folder}: {problem}")
        self.folder, self.problem = folder, problem


@dataclass(frozen=True)
class Target:
    """A checked target folder."""

    folder: Path
    digest: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int


def check_target(folder: Path) -> Target:
    """Check that ``folder`` is a causal language model with weights, tokenizer and chat template.

    Raises :class:`TargetUnusable`, which names the file and what to do.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TargetUnusable(folder, "no such folder; `tide target prepare` makes the default one")
    config = _read_json(folder, "config.json")
    architecture = next(iter(config.get("architectures") or []), "")
    if not architecture.endswith("ForCausalLM"):
        raise TargetUnusable(
            folder,
            f"config.json names architecture {architecture or 'none'}, not a ...ForCausalLM language model",
        )
    if "Eagle" in architecture or "draft_vocab_size" in config:
        raise TargetUnusable(folder, f"it holds a draft ({architecture}), not a target; give it as `draft`")
    sizes = {}
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if not isinstance(config.get(key), int):
            raise TargetUnusable(folder, f"config.json has no {key}")
        sizes[key] = config[key]
    _check_weights(folder)
    if not (folder / "tokenizer.json").is_file():
        raise TargetUnusable(
            folder, "no tokenizer.json there; save the model's fast tokenizer beside its weights"
        )
    if not _has_template(folder):
        raise TargetUnusable(
            folder, "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        )
    return Target(
        folder=folder,
        digest=target_digest(folder),
        architecture=architecture,
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
    )


def _check_weights(folder: Path) -> None:
    """Every shard that the index names is there, and no file is cut short."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise TargetUnusable(folder, "no weights (*.safetensors) there")
    if (folder / "model.safetensors.index.json").is_file():
        index = _read_json(folder, "model.safetensors.index.json")
        for name in sorted(set(index.get("weight_map", {}).values())):
            if not (folder / name).is_file():
                raise TargetUnusable(folder, f"weights incomplete: {name} is named by the index and missing")
    for shard in shards:
        _check_shard(folder, shard)


def _check_shard(folder: Path, shard: Path) -> None:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise TargetUnusable(folder, f"weights damaged: {shard.name} is no safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise TargetUnusable(folder, f"weights damaged: {shard.name}: {error}") from error
    end = max(
        (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
    )
    if size != 8 + length + end:
        raise TargetUnusable(
            folder, f"weights damaged: {shard.name} has {size} bytes, {8 + length + end} expected"
        )


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(_read_json(folder, path.name).get("chat_template"))


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise TargetUnusable(folder, f"no {name} there; a target is a Hugging Face model folder") from error
    except ValueError as error:
        raise TargetUnusable(folder, f"{name} is not JSON: {error}") from error
