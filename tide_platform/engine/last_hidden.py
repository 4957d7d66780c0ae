"""The last hidden states of a forward step: what the target's head multiplied, found where logits are seen.

SGLang's logits processor gets the final states after the norm, multiplies them by the head and drops them. A
hook around it notes them on its output. A CUDA graph runs no hook when it is replayed: its output is a new
object whose tensors begin where those of the recorded run lie, so what was noted while the graph was recorded
is found by the address of the aux states. Both tensors are kept as long as the server runs, else their
addresses would mean nothing.

Shapes: R rows of the step, H hidden size. Row r of the states is row r of the step's aux states.
"""

from collections.abc import Callable
from typing import Any

import torch

from tide_platform.config import TideError

MARK = "tide_last_hidden"  # attribute of a logits processor's output


class NoLastHidden(TideError):
    """A step whose last hidden states were not seen, or do not fit its aux states."""

    def __init__(self, found: int | None, wanted: int):
        what = "none" if found is None else f"{found} rows"
        super().__init__(
            f"last hidden states: {what} of a step of {wanted} rows; serve with capture.target_signal: topk"
        )
        self.found, self.wanted = found, wanted


class LastHidden:
    """Notes the states of each step of target and draft; nobody asks for the draft's."""

    def __init__(self, recording: Callable[[], bool] = torch.cuda.is_current_stream_capturing):
        """``recording``: whether a graph is being recorded on the current stream."""
        self._recording = recording
        # address of the aux states -> they, and the last hidden states
        self._graphs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_logits(
        self,
        original: Callable,
        processor: Any,
        input_ids: Any,
        hidden_states: torch.Tensor,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Parameters as SGLang names them: some models give them by name."""
        output = original(processor, input_ids, hidden_states, *rest, **named)
        aux = output.hidden_states
        if aux is not None:
            setattr(output, MARK, hidden_states)
            if hidden_states.is_cuda and self._recording():
                self._graphs[aux.data_ptr()] = (aux, hidden_states)
        return output

    def of(self, output: Any) -> torch.Tensor:
        """[R, H] of the step whose logits are ``output``. Raises :class:`NoLastHidden`."""
        aux, states = output.hidden_states, getattr(output, MARK, None)
        if states is None:
            _, states = self._graphs.get(aux.data_ptr(), (None, None))
            states = None if states is None else states[: len(aux)]
        if states is None or len(states) != len(aux):
            raise NoLastHidden(None if states is None else len(states), len(aux))
        return states
