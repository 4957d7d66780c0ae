"""Checks of a draft folder that need no server."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tide_platform.config import draft_digest
from tide_platform.engine.draft_file import (
    DraftChanged,
    DraftIncompatible,
    DraftLayout,
    DraftOutsideRoot,
    check_draft,
    confined,
    tensor_name,
)

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4,
    "vocab_size": 32,
    "draft_vocab_size": 8,
}


def _folder(path: Path, config: dict | None = None, **changed: torch.Tensor | None) -> Path:
    path.mkdir(parents=True)
    tensors = {
        "fc.weight": torch.randn(4, 12),
        "midlayer.mlp.up_proj.weight": torch.randn(6, 4),
        "lm_head.weight": torch.randn(8, 4),
        "d2t": torch.arange(8),
        "t2d": torch.zeros(32, dtype=torch.bool),
        **changed,
    }
    save_file({name: t for name, t in tensors.items() if t is not None}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "drafts"


@pytest.fixture
def served(tmp_path: Path) -> DraftLayout:
    return DraftLayout.read(_folder(tmp_path / "served"))


def test_a_good_draft_passes(root: Path, served: DraftLayout) -> None:
    folder = _folder(root / "a")
    checked = check_draft(str(folder), draft_digest(folder), root, served)
    assert (checked.folder, checked.ignored) == (folder, [])


def test_names_of_other_exports_are_the_same_tensors(root: Path, served: DraftLayout) -> None:
    renamed = {"midlayer.mlp.up_proj.weight": None, "model.layers.0.mlp.up_proj.weight": torch.randn(6, 4)}
    folder = _folder(root / "a", **renamed)
    check_draft(str(folder), draft_digest(folder), root, served)


def test_embeddings_in_the_file_are_ignored_and_said(root: Path, served: DraftLayout) -> None:
    folder = _folder(root / "a", **{"embed_tokens.weight": torch.zeros(32, 4)})
    assert check_draft(str(folder), draft_digest(folder), root, served).ignored == ["embed_tokens.weight"]


def test_a_borrowed_head_in_the_file_is_ignored(tmp_path: Path, root: Path) -> None:
    plain = {"config": {"draft_vocab_size": None}, "d2t": None, "t2d": None}
    served = DraftLayout.read(_folder(tmp_path / "borrowing", **plain, **{"lm_head.weight": None}))
    folder = _folder(root / "a", **plain)
    assert check_draft(str(folder), draft_digest(folder), root, served).ignored == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"config": {"hidden_size": 8}}, "hidden_size is 8, the served draft has 4"),
        ({"config": {"architectures": ["LlamaForCausalLMEagle"]}}, "architectures"),
        ({"config": {"fc_norm": True}}, "fc_norm"),
        ({"fc.weight": None}, r"tensors missing: fc\.weight"),
        ({"fc.weight": torch.zeros(4, 4)}, r"fc\.weight has shape \[4, 4\], the served draft's \[4, 12\]"),
        ({"d2t": torch.arange(7)}, "d2t has shape"),
        ({"fcc.weight": torch.zeros(1)}, r"unknown to the served draft: fcc\.weight"),
    ],
)
def test_another_family_is_refused_by_name(
    root: Path, served: DraftLayout, changed: dict, named: str
) -> None:
    folder = _folder(root / "a", **changed)
    with pytest.raises(DraftIncompatible, match=named):
        check_draft(str(folder), draft_digest(folder), root, served)


def test_another_digest_is_refused(root: Path, served: DraftLayout) -> None:
    folder = _folder(root / "a")
    with pytest.raises(DraftChanged, match="0000"):
        check_draft(str(folder), "0000", root, served)


@pytest.mark.parametrize("size", [0, 4, 40, -1])
def test_a_cut_file_is_refused(root: Path, served: DraftLayout, size: int) -> None:
    folder = _folder(root / "a")
    path = folder / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(DraftIncompatible):
        check_draft(str(folder), "any", root, served)


def test_paths_are_confined(tmp_path: Path, root: Path) -> None:
    outside, inside = _folder(tmp_path / "outside"), _folder(root / "a")
    (root / "link").symlink_to(outside)
    assert confined(str(inside), root) == inside
    assert confined(str(root / "b" / ".." / "a"), root) == inside
    for path in (outside, root, root / ".." / "outside", root / "link", Path("/"), tmp_path / "drafts-b"):
        with pytest.raises(DraftOutsideRoot, match=str(root)):
            confined(str(path), root)


def test_tensor_names() -> None:
    assert tensor_name("model.midlayer.self_attn.q_proj.weight") == "layers.0.self_attn.q_proj.weight"
    assert tensor_name("aux_norm_high.weight") == "fc_norm.2.weight"
