"""Model folders small enough to write in a test: right in form, with nothing learnt."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_target(folder: Path, **config: object) -> Path:
    """A target as :func:`check_target` wants it, of one tiny tensor."""
    folder.mkdir(parents=True)
    base = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 6,
        "vocab_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(base | config))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write_draft(folder: Path, value: float = 0.0) -> Path:
    """A draft folder as far as staging looks at it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    save_file({"fc.weight": torch.full((4, 4), value)}, folder / "model.safetensors")
    (folder / "tide.json").write_text("{}")
    return folder
