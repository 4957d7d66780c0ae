"""Last hidden states are found for the output whose logits they made, also where a graph was replayed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tide_platform.engine.last_hidden import LastHidden, NoLastHidden


class OnDevice(torch.Tensor):
    """Says that it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def on_device(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).as_subclass(OnDevice)


def run(last: LastHidden, states: torch.Tensor, aux: torch.Tensor) -> Any:
    """A forward of the logits processor, called as SGLang's models do."""
    output = SimpleNamespace(hidden_states=aux, next_token_logits=None)
    return last.on_logits(lambda *_, **__: output, None, None, states, "head", "metadata", [aux])


def test_the_states_of_an_output_are_the_ones_that_made_it() -> None:
    last = LastHidden()
    first, second = torch.randn(5, 4), torch.randn(3, 4)
    outputs = run(last, first, torch.randn(5, 12)), run(last, second, torch.randn(3, 12))
    assert last.of(outputs[0]) is first and last.of(outputs[1]) is second


def test_a_replayed_graph_is_found_by_its_address() -> None:
    last = LastHidden(recording=lambda: True)
    recorded = {}
    for rows in (8, 4, 2):
        states, aux = on_device(rows, 4), on_device(rows, 12)
        run(last, states, aux)
        recorded[rows] = (states, aux)
    for rows, used in ((8, 7), (4, 4), (2, 1)):  # the rest of a graph's rows is padding
        states, aux = recorded[rows]
        replayed = SimpleNamespace(hidden_states=aux[:used])
        states += 1  # each replay writes them again, in place
        assert torch.equal(last.of(replayed), states[:used])


def test_a_run_that_no_graph_records_is_not_kept() -> None:
    last = LastHidden(recording=lambda: False)
    aux = on_device(2, 12)
    run(last, on_device(2, 4), aux)
    with pytest.raises(NoLastHidden, match="none of a step of 2 rows"):
        last.of(SimpleNamespace(hidden_states=aux))


def test_states_that_do_not_fit_the_aux_states_are_refused() -> None:
    last = LastHidden()
    with pytest.raises(NoLastHidden, match="3 rows of a step of 5 rows"):
        last.of(run(last, torch.randn(3, 4), torch.randn(5, 12)))


def test_a_step_without_aux_states_is_let_through() -> None:
    last = LastHidden()
    output = SimpleNamespace(hidden_states=None)
    assert last.on_logits(lambda *_: output, None, None, torch.randn(2, 4)) is output
    assert vars(output) == {"hidden_states": None}
