"""The target by transformers: states of the right layers, whatever the padding."""

from pathlib import Path

import pytest
import torch

from tide_platform.draft.errors import BadAuxLayers
from tide_platform.draft.target_model import TargetModel

TINY = Path(__file__).parents[2] / "fixtures" / "tiny_target"


def test_states_are_what_transformers_calls_hidden_states() -> None:
    target = TargetModel(TINY, (1, 2, 3))
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    found = target.states(ids)
    output = target.model(ids, output_hidden_states=True)
    expected = torch.cat([output.hidden_states[i] for i in (1, 2, 3)], -1)
    torch.testing.assert_close(found.aux_BTF, expected)
    torch.testing.assert_close(found.last_hidden_BTH, output.hidden_states[-1])
    torch.testing.assert_close(target.logits(found.last_hidden_BTH), output.logits)


def test_padding_on_the_right_changes_nothing() -> None:
    target = TargetModel(TINY, (1, 2, 3))
    ids = torch.randint(0, 256, (1, 7), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.int64)], 1)
    mask = torch.arange(11)[None] < 7
    torch.testing.assert_close(target.states(padded, mask).aux_BTF[:, :7], target.states(ids).aux_BTF)


def test_a_layer_that_is_not_there_is_named() -> None:
    with pytest.raises(BadAuxLayers, match="9"):
        TargetModel(TINY, (1, 2, 9))
