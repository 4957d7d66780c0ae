"""Drafts and targets that look right and are not: refused by name, or repaired and said (bad-inputs.md)."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import AUX_LAYERS, TINY, tiny_parts

from tide_platform.config import target_digest
from tide_platform.draft import errors
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.draft.vocab import choose_vocabulary, map_digest, to_maps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draft = new_draft(tiny_parts(), np.arange(64), AUX_LAYERS)
    save_draft(tmp_path / "d", draft, {"target_digest": target_digest(TINY)})
    return tmp_path / "d"


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_map(folder: Path, ids: np.ndarray) -> None:
    """The draft's file with another vocabulary map, whole in itself."""
    tensors = load_file(folder / "model.safetensors")
    d2t, t2d = to_maps(ids, 256)
    save_file(
        tensors | {"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}, folder / "model.safetensors"
    )


def target(
    folder: Path,
    edit: dict[str, torch.Tensor | None] | None = None,
    shards: int = 1,
    tied: bool | None = True,
) -> Path:
    """The tiny target, written anew; ``edit``: tensors to add, or leave out where None."""
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    config.pop("tie_word_embeddings")
    if tied is not None:
        config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        k: v for k, v in (load_file(TINY / "model.safetensors") | (edit or {})).items() if v is not None
    }
    names = sorted(tensors)
    for n in range(shards):
        part = {k: tensors[k] for k in names[n::shards]}
        name = "model.safetensors" if shards == 1 else f"model-{n + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    return folder


def test_fewer_distinct_tokens_than_the_draft_vocabulary_are_filled_up_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = np.zeros(256, np.int64)
    counts[100:110] = 5
    with caplog.at_level(logging.WARNING, logger="tide.draft"):
        chosen = choose_vocabulary(counts, 64)
    assert chosen.tolist() == [*range(54), *range(100, 110)]
    assert "10 distinct tokens, the draft's vocabulary 64: filled up with the 54 lowest" in caplog.text
    caplog.clear()
    choose_vocabulary(counts, 10)
    assert not caplog.text


@pytest.mark.parametrize("tied", [True, None])
def test_a_tied_target_without_a_head_lends_its_embeddings(tmp_path: Path, tied: bool | None) -> None:
    parts = load_target_parts(target(tmp_path / "t", {"lm_head.weight": None}, tied=tied))
    assert parts.lm_head_VH is parts.embed_VH


def test_an_untied_target_without_a_head_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        errors.DraftIncomplete, match=r"lm_head\.weight; is this the folder of a target, whole"
    ):
        load_target_parts(target(tmp_path / "t", {"lm_head.weight": None}, tied=False))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_target_is_one_file_without_an_index_or_several_with_one(tmp_path: Path, shards: int) -> None:
    parts, expected = load_target_parts(target(tmp_path / "t", shards=shards)), tiny_parts()
    assert torch.equal(parts.embed_VH, expected.embed_VH)
    assert parts.last_layer.keys() == expected.last_layer.keys()


def test_a_target_without_its_last_layer_is_named(tmp_path: Path) -> None:
    names = load_file(TINY / "model.safetensors")
    gone: dict[str, torch.Tensor | None] = {n: None for n in names if ".layers.3." in n}
    with pytest.raises(errors.DraftIncomplete, match=r"layers\.3\."):
        load_target_parts(target(tmp_path / "t", gone))


def test_the_last_layers_output_is_no_aux_layer(folder: Path) -> None:
    """Id 4 of 4 layers: Hugging Face's hidden_states[4] is after the final norm, SGLang's state before it."""
    edit_json(folder / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]})
    with pytest.raises(errors.BadAuxLayers, match=r"4 is the output of the last layer.*after the final norm"):
        check_draft(folder, TINY)


ROPES = [
    ({"rope_type": "default", "rope_theta": 5e5}, "rope_theta"),
    ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "rope_type"),
]  # fmt: skip


@pytest.mark.parametrize(("rope", "what"), ROPES)
def test_a_rope_unlike_the_targets_is_named(folder: Path, rope: dict[str, Any], what: str) -> None:
    edit_json(folder / "config.json", rope_parameters=rope, rope_scaling=None, rope_theta=rope["rope_theta"])
    with pytest.raises(errors.DraftMismatch, match=f"{what} is .*--accept-rope") as caught:
        check_draft(folder, TINY)
    assert caught.value.what == what
    edit_json(folder / "config.json", rope_differs=True)
    assert check_draft(folder, TINY).rope["rope_type"] == rope["rope_type"]


def test_a_rope_that_is_served_otherwise_is_named(folder: Path) -> None:
    edit_json(
        folder / "config.json", rope_scaling={"rope_type": "longrope", "factor": 2.0}, rope_differs=True
    )
    with pytest.raises(errors.UnsupportedRope, match="longrope"):
        check_draft(folder, TINY)


def test_dynamic_rope_is_stretched_from_the_same_maximum(folder: Path, tmp_path: Path) -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    other = target(tmp_path / "t")
    for path in (folder, other):
        edit_json(path / "config.json", rope_parameters=dynamic, rope_scaling=None)
    edit_json(folder / "tide.json", target_digest=target_digest(other))
    check_draft(folder, other)
    edit_json(folder / "config.json", max_position_embeddings=1024)
    with pytest.raises(errors.DraftMismatch, match="rope max_position_embeddings is 1024"):
        check_draft(folder, other)


def test_a_map_that_is_not_the_one_it_was_trained_with_is_named(folder: Path) -> None:
    """Whole in itself, so that only ``tide.json`` can tell."""
    told = json.loads((folder / "tide.json").read_text())
    assert told["map_digest"] == map_digest(np.zeros(64, np.int64))
    with_map(folder, np.arange(1, 65))
    with pytest.raises(
        errors.BadVocabularyMap, match=f"not the map it was trained with \\({told['map_digest']}"
    ):
        check_draft(folder, TINY)


def test_a_child_with_another_map_than_its_parent_is_named(folder: Path, tmp_path: Path) -> None:
    draft = new_draft(tiny_parts(), np.arange(1, 65), AUX_LAYERS)
    save_draft(tmp_path / "child", draft, {})
    check_draft(folder, TINY, parent_folder=folder)
    check_draft(tmp_path / "child", TINY)
    with pytest.raises(
        errors.BadVocabularyMap, match=r"not that of its parent .*: fine-tuning must keep the map"
    ):
        check_draft(tmp_path / "child", TINY, parent_folder=folder)


def test_a_draft_for_another_checkpoint_of_the_target_is_named(folder: Path, tmp_path: Path) -> None:
    """Same shapes, other weights."""
    norm = load_file(TINY / "model.safetensors")["model.norm.weight"]
    other = target(tmp_path / "t", {"model.norm.weight": norm + 1})
    with pytest.raises(errors.DraftMismatch, match=r"target_digest is .*tide draft import") as caught:
        check_draft(folder, other)
    assert caught.value.draft_value == target_digest(TINY) and caught.value.target_value == target_digest(
        other
    )


def test_a_torn_provenance_is_named(folder: Path) -> None:
    (folder / "tide.json").write_text('{"target_digest": ')
    with pytest.raises(errors.DraftCorrupt, match=r"tide\.json"):
        check_draft(folder, TINY)
    (folder / "tide.json").unlink()  # a draft of another trainer has none
    check_draft(folder, TINY)


@pytest.mark.parametrize("name", ["lm_head.weight", "d2t", "t2d"])
def test_an_export_without_head_or_map_is_named(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(errors.DraftIncomplete, match=name.replace(".", r"\.")):
        check_draft(folder, TINY)
