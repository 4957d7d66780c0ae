"""What the captured rows must be, by a run that is not the one that was captured.

``transformers``: the target in fp32 over the whole text; knows every layer, and each state before and after
its norm. ``engine`` (``reference_engine.py``): for targets that transformers can't run; knows what the engine
tells.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tide_platform.draft.target_model import TargetModel


@dataclass(frozen=True)
class Reference:
    """Of one text. What a kind of reference doesn't know is empty, or None."""

    kind: str
    entering: dict[int, torch.Tensor]  # layer i -> residual stream entering it [T, H]
    logp: dict[int, dict[int, float]]  # position p -> token -> log p(token | x[0..p]), of the likely tokens
    normed: dict[int, torch.Tensor] = field(default_factory=dict)  # the same after layer i's input norm
    before_norm_TH: torch.Tensor | None = None  # the last state before the final norm
    last_hidden_TH: torch.Tensor | None = None  # after it
    logp_TV: torch.Tensor | None = None  # log-softmax of the raw logits
    logp_before_norm_TV: torch.Tensor | None = None  # of logits that skip the final norm


class TransformersReference:
    """The target, loaded once."""

    def __init__(self, target: Path, aux_layer_ids: tuple[int, ...]):
        self._target = TargetModel(target, aux_layer_ids)
        self._decoder: Any = self._target.model.get_decoder()

    @torch.inference_mode()
    def run(self, tokens: list[int]) -> Reference:
        with _tapped(self._decoder) as taken:
            states = self._target.states(torch.tensor([tokens]))
        before = taken["before", -1]
        logits, wrong = self._target.logits(states.last_hidden_BTH[0]), self._target.logits(before)
        return Reference(
            "transformers",
            {layer: state for (kind, layer), state in taken.items() if kind == "entering"},
            {},
            {layer: state for (kind, layer), state in taken.items() if kind == "normed"},
            before,
            states.last_hidden_BTH[0].float(),
            torch.log_softmax(logits.float(), -1),
            torch.log_softmax(wrong.float(), -1),
        )


@contextmanager
def _tapped(decoder: Any) -> Iterator[dict[tuple[str, int], torch.Tensor]]:
    """States [T, H] of the passes inside the block: ("entering" | "normed", layer), ("before", -1)."""
    taken: dict[tuple[str, int], torch.Tensor] = {}

    def before(kind: str, layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taken[kind, layer] = (args[0] if args else kwargs["hidden_states"])[0].float()

        return hook

    def after(layer: int) -> Any:
        def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
            taken["normed", layer] = output[0].float()

        return hook

    handles = [decoder.norm.register_forward_pre_hook(before("before", -1), with_kwargs=True)]
    for number, layer in enumerate(decoder.layers):
        handles.append(layer.register_forward_pre_hook(before("entering", number), with_kwargs=True))
        handles.append(layer.input_layernorm.register_forward_hook(after(number)))
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()
