import json

import pytest

from tests.unit.serving.fakes import write_target
from tide_platform.config import target_digest
from tide_platform.serving.target_folder import TargetUnusable, check_target


def test_a_whole_folder_is_usable(tmp_path):
    folder = write_target(tmp_path / "model")
    target = check_target(folder)
    assert (target.hidden_size, target.num_layers, target.vocab_size) == (8, 6, 32)
    assert target.digest == target_digest(folder)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
)
def test_a_missing_file_is_named(tmp_path, name):
    folder = write_target(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(TargetUnusable, match=r"safetensors|config.json|tokenizer|chat_template"):
        check_target(folder)


def test_no_folder(tmp_path):
    with pytest.raises(TargetUnusable, match="tide target prepare"):
        check_target(tmp_path / "none")


def test_a_draft_is_no_target(tmp_path):
    folder = write_target(tmp_path / "model", draft_vocab_size=16)
    with pytest.raises(TargetUnusable, match="holds a draft"):
        check_target(folder)


def test_another_kind_of_model(tmp_path):
    folder = write_target(tmp_path / "model", architectures=["BertForMaskedLM"])
    with pytest.raises(TargetUnusable, match="BertForMaskedLM"):
        check_target(folder)


def test_weights_cut_short(tmp_path):
    folder = write_target(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(TargetUnusable, match=r"damaged: model.safetensors has \d+ bytes"):
        check_target(folder)


def test_a_shard_that_the_index_names_is_missing(tmp_path):
    folder = write_target(tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetUnusable, match=r"model-2.safetensors"):
        check_target(folder)


def test_template_in_the_tokenizer_config(tmp_path):
    folder = write_target(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert check_target(folder).vocab_size == 32
