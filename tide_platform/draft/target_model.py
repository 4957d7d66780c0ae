"""The target run by transformers: the states that a draft reads and the logits that teach it.

For what must not come from the serving engine: the consistency gate's reference, features of a file's own
answers, and what recomputing states costs against storing them.

Shapes: B texts, T tokens, F = 3H aux width, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_platform.draft.config import read_config, text_config
from tide_platform.draft.errors import BadAuxLayers


@dataclass(frozen=True)
class TargetStates:
    """What one forward pass gives, in the model's dtype."""

    aux_BTF: torch.Tensor  # the residual stream entering the aux layers, concatenated in their order
    last_hidden_BTH: torch.Tensor  # after the final norm


def padded(texts: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids int64 [B, T], mask bool [B, T])`` of texts of any lengths, padded on the right."""
    longest = max(len(ids) for ids in texts)
    ids_BT = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask_BT = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, ids in enumerate(texts):
        ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        mask_BT[row, : len(ids)] = True
    return ids_BT, mask_BT


class TargetModel:
    """A Hugging Face causal language model, its states numbered as ``capture.record.StreamMeta`` does."""

    def __init__(
        self,
        folder: Path,
        aux_layer_ids: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        """``aux_layer_ids``: layers i whose *input* is taken. Raises :class:`BadAuxLayers` where the target
        has no such layer, and what transformers raises where it can't load the folder.
        """
        from transformers import AutoModelForCausalLM

        layers = text_config(read_config(folder))["num_hidden_layers"]
        if not all(0 < i < layers for i in aux_layer_ids):
            raise BadAuxLayers(folder, aux_layer_ids, layers)
        self.aux_layer_ids = aux_layer_ids
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self.model.to(device).eval()
        self._decoder = self.model.get_decoder()
        self._head = self.model.get_output_embeddings()

    @torch.inference_mode()
    def states(self, input_ids_BT: torch.Tensor, mask_BT: torch.Tensor | None = None) -> TargetStates:
        """One pass over whole texts. ``mask_BT``: false in the padding, which must be on the right."""
        with self._tapped() as taken:
            mask = None if mask_BT is None else mask_BT.long()
            output = self._decoder(input_ids=input_ids_BT, attention_mask=mask, use_cache=False)
        return TargetStates(torch.cat([taken[i] for i in self.aux_layer_ids], -1), output.last_hidden_state)

    @torch.inference_mode()
    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits [..., V] of last hidden states [..., H]."""
        return self._head(last_hidden)

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, torch.Tensor]]:
        """The inputs of the aux layers, by layer, of the passes inside the block."""
        taken: dict[int, torch.Tensor] = {}

        def tap(layer: int) -> Any:
            def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                taken[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = [
            self._decoder.layers[i].register_forward_pre_hook(tap(i), with_kwargs=True)
            for i in self.aux_layer_ids
        ]
        try:
            yield taken
        finally:
            for handle in handles:
                handle.remove()
