"""Drafts of other trainers, in their layouts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import AUX_LAYERS, TINY, tiny_parts

from tide_platform.config import target_digest
from tide_platform.draft import errors
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.importer import UnsupportedDraft, import_draft
from tide_platform.draft.vocab import map_digest


@pytest.fixture(scope="module")
def original() -> Eagle3Draft:
    return new_draft(tiny_parts(), np.arange(10, 74), AUX_LAYERS)


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], binary: bool = False
) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def weights(draft: Eagle3Draft) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in draft.state_dict().items()}


def same(folder: Path, draft: Eagle3Draft) -> None:
    for name, tensor in load_draft(folder).state_dict().items():
        expected = draft.state_dict()[name]
        assert torch.equal(
            tensor, expected.to(torch.bfloat16).float() if expected.is_floating_point() else expected
        )


def test_specforge(tmp_path: Path, original: Eagle3Draft) -> None:
    tensors = {f"draft_model.{k}": v for k, v in weights(original).items()}
    tensors["draft_model.embed_tokens.weight"] = torch.zeros(256, 96)
    source = write(tmp_path / "a", original.config.to_json(), tensors)
    report = import_draft(source, TINY, tmp_path / "out")
    same(tmp_path / "out", original)
    assert report.layout == "specforge" and "embed_tokens" in report.repairs[0] and not report.warnings


def test_eagle_release_with_a_binary_file(tmp_path: Path, original: Eagle3Draft) -> None:
    tensors = {k.replace("midlayer", "layers.0"): v for k, v in weights(original).items() if k != "t2d"}
    source = write(tmp_path / "a", original.config.to_json(), tensors, binary=True)
    report = import_draft(source, TINY, tmp_path / "out")
    same(tmp_path / "out", original)
    assert report.repairs == ("t2d added from d2t",)


def test_speculators(tmp_path: Path, original: Eagle3Draft) -> None:
    plain = original.config.to_json()
    layer = {k: v for k, v in plain.items() if k not in ("eagle_config", "draft_vocab_size", "architectures")}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 64,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),  # entries of layers, not SGLang's numbering
    }
    tensors = {k.replace("midlayer", "layers.0"): v for k, v in weights(original).items()}
    report = import_draft(write(tmp_path / "a", config, tensors), TINY, tmp_path / "out")
    same(tmp_path / "out", original)
    assert report.layout == "speculators" and load_draft(tmp_path / "out").config.aux_layer_ids == AUX_LAYERS
    write(tmp_path / "b", config | {"norm_before_residual": True}, tensors)
    with pytest.raises(UnsupportedDraft, match="norm_before_residual"):
        import_draft(tmp_path / "b", TINY, tmp_path / "out2")


def test_borrowed_head_and_whole_vocabulary(tmp_path: Path) -> None:
    draft = new_draft(tiny_parts(), np.arange(256), AUX_LAYERS)
    tensors = {k: v for k, v in weights(draft).items() if k not in ("d2t", "t2d", "lm_head.weight")}
    config = draft.config.to_json() | {"draft_vocab_size": None}
    report = import_draft(write(tmp_path / "a", config, tensors), TINY, tmp_path / "out")
    same(tmp_path / "out", draft)
    assert len(report.repairs) == 3


def test_refusals(tmp_path: Path, original: Eagle3Draft) -> None:
    config, tensors = original.config.to_json(), weights(original)

    def attempt(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        import_draft(write(tmp_path / name, config, tensors), TINY, tmp_path / f"{name}-out")

    with pytest.raises(errors.DraftIncomplete, match="can't be guessed"):
        attempt("map", config, {k: v for k, v in tensors.items() if k != "d2t"})
    with pytest.raises(errors.BadVocabularyMap, match="ids instead of offsets"):
        attempt("ids", config, tensors | {"d2t": torch.arange(64) + 240})
    with pytest.raises(errors.WrongArchitecture):
        attempt("arch", config | {"architectures": ["Qwen3ForCausalLM"]}, tensors)
    with pytest.raises(errors.TooManyLayers):
        attempt("layers", config | {"num_hidden_layers": 2}, tensors)
    with pytest.raises(errors.DraftIncomplete, match=r"fc\.weight"):
        attempt("fc", config, {k: v for k, v in tensors.items() if k != "fc.weight"})
    with pytest.raises(errors.DraftIncomplete, match=r"safetensors"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.json").write_text(json.dumps(config))
        import_draft(tmp_path / "empty", TINY, tmp_path / "empty-out")


def test_a_rope_unlike_the_targets_must_be_accepted(tmp_path: Path, original: Eagle3Draft) -> None:
    config = original.config.to_json() | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    source = write(tmp_path / "a", config, weights(original))
    with pytest.raises(
        errors.DraftMismatch, match=r"rope_theta is 500000\.0.*10000\.0.*--accept-rope"
    ) as caught:
        import_draft(source, TINY, tmp_path / "out")
    assert caught.value.what == "rope_theta" and not (tmp_path / "out").exists()
    report = import_draft(source, TINY, tmp_path / "out", accept_rope=True)
    assert "rope" in report.warnings[0]
    draft = load_draft(tmp_path / "out")
    assert draft.config.rope_differs and draft.config.rope["rope_theta"] == 5e5
    save_draft(tmp_path / "child", draft, {"parent": report.digest})  # fine-tuned drafts inherit it
    assert check_draft(tmp_path / "child", TINY).rope_differs


def test_an_imported_draft_is_bound_to_its_target(tmp_path: Path, original: Eagle3Draft) -> None:
    """Whatever target its old ``tide.json`` names: importing is how one says that it fits this one."""
    source = write(tmp_path / "a", original.config.to_json(), weights(original))
    (source / "tide.json").write_text(json.dumps({"target_digest": "another"}))
    import_draft(source, TINY, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "tide.json").read_text())
    assert told["target_digest"] == target_digest(TINY)
    assert told["map_digest"] == map_digest(original.d2t.numpy())
