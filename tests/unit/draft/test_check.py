"""Each wrong draft is refused by its name, from headers alone."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import AUX_LAYERS, TINY, tiny_parts

from tide_platform.config import TideError
from tide_platform.draft import errors
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import new_draft, save_draft

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_draft(tmp_path / "d", new_draft(tiny_parts(), np.arange(64), AUX_LAYERS), {})
    return tmp_path / "d"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


CONFIGS = [
    ({"architectures": ["LlamaForCausalLMEagle"]}, errors.WrongArchitecture, "EAGLE-1/2"),
    ({"architectures": ["LlamaForCausalLM"]}, errors.WrongArchitecture, "tide draft import"),
    ({"num_hidden_layers": 2}, errors.TooManyLayers, "2 layers"),
    ({"vocab_size": 300}, errors.DraftMismatch, "vocab_size is 300, the target .* has 256"),
    ({"hidden_size": 64}, errors.DraftMismatch, "hidden_size"),
    ({"target_hidden_size": 64}, errors.DraftMismatch, "hidden_size is 64"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, errors.BadAuxLayers, r"1\.\.3"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, errors.BadAuxLayers, "different"),
    ({"draft_vocab_size": 65}, errors.BadTensorShape, r"lm_head\.weight"),
    ({"intermediate_size": 128}, errors.BadTensorShape, "mlp"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "text"), CONFIGS)
def test_configs(folder: Path, changes: dict[str, Any], error: type[TideError], text: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(error, match=text) as caught:
        check_draft(folder, TINY)
    assert "\n" not in str(caught.value)


TENSORS: list[tuple[Edit, type[TideError], str]] = [
    (lambda t: t.pop("fc_norm.1.weight"), errors.DraftIncomplete, r"fc_norm\.1\.weight"),
    (lambda t: t.pop("d2t"), errors.DraftIncomplete, "d2t"),
    (lambda t: t.update(d2t=torch.zeros(63, dtype=torch.int64)), errors.BadVocabularyMap, "length 63"),
    (lambda t: t.update(t2d=torch.zeros(255, dtype=torch.bool)), errors.BadVocabularyMap, "length 255"),
    (lambda t: t.update(d2t=torch.full((64,), 250)), errors.BadVocabularyMap, "outside"),
    (lambda t: t.update(d2t=-torch.arange(64)), errors.BadVocabularyMap, "two draft ids"),
    (lambda t: t.update(d2t=t["d2t"] + 1), errors.BadVocabularyMap, "t2d does not mark"),
    (
        lambda t: t.update(t2d=torch.zeros(256, dtype=torch.bool)),
        errors.BadVocabularyMap,
        "t2d does not mark",
    ),
    (lambda t: t.update(d2t=t["d2t"].float()), errors.BadVocabularyMap, "F32"),
]


@pytest.mark.parametrize(("edit", "error", "text"), TENSORS)
def test_tensors(folder: Path, edit: Edit, error: type[TideError], text: str) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(error, match=text):
        check_draft(folder, TINY)


@pytest.mark.parametrize(
    ("size", "text"), [(4, "not a safetensors header"), (60, "damaged"), (20_000, "ends before")]
)
def test_torn_file(folder: Path, size: int, text: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(errors.DraftCorrupt, match=text):
        check_draft(folder, TINY)


def test_no_torch_is_loaded(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tide_platform.draft.check import check_draft;"
        f"check_draft(Path({str(folder)!r}), Path({str(TINY)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
