"""What an optimizer step changes: weights, moments, counters; and as the tensors of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tide_platform.config.schema import Training
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.training.world import sharded_like, whole

BETAS = (0.9, 0.95)
_WEIGHT, _MOMENT, _RNG = "draft.", "adamw.", "rng."


@dataclass
class State:
    """A run between two steps. The draft's fp32 parameters are the masters: bf16 exists inside a step
    only.
    """

    draft: Eagle3Draft
    optimizer: torch.optim.AdamW
    step: int = 0  # optimizer steps done
    tokens: int = 0  # response tokens seen
    seconds: float = 0.0  # spent in steps

    @classmethod
    def begin(cls, draft: Eagle3Draft, settings: Training) -> "State":
        """AdamW over all trainable parameters, its moments at zero."""
        parameters = [p for p in draft.parameters() if p.requires_grad]
        return cls(
            draft,
            torch.optim.AdamW(
                parameters,
                lr=settings.learning_rate,
                betas=BETAS,
                weight_decay=settings.weight_decay,
                fused=True,
            ),
        )

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def tensors(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Everything that the next step depends on, contiguous copies on the CPU: whole also where processes
        hold shards, all of which then call this; those that only give their shards ``keep`` nothing.

        ``draft.NAME``: parameters (fp32) and the map; ``adamw.KEY.NAME``: a parameter's moments (fp32) and
        step count; ``rng.DEVICE``: torch's generators (uint8).
        """
        found = {_WEIGHT + name: tensor for name, tensor in self.draft.state_dict().items()}
        for name, parameter in self._trained():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{_MOMENT}{key}.{name}"] = value
        found[_RNG + "cpu"] = torch.get_rng_state()
        if self._device().type == "cuda":
            found[_RNG + "cuda"] = torch.cuda.get_rng_state(self._device())
        kept = {}
        for name, tensor in found.items():
            all_of_it = whole(tensor.detach())
            if keep:
                kept[name] = all_of_it.to("cpu", copy=True).contiguous()
        return kept

    def load(self, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, Any]) -> None:
        """Puts back what :meth:`tensors` and :meth:`counters` gave."""
        device = self._device()
        own = self.draft.state_dict()
        weights = {name: sharded_like(tensors[_WEIGHT + name], value) for name, value in own.items()}
        self.draft.load_state_dict(weights)
        for name, parameter in self._trained():
            self.optimizer.state[parameter] = {
                name_of.removeprefix(_MOMENT).removesuffix(f".{name}"): (
                    sharded_like(tensor, parameter) if tensor.shape == parameter.shape else tensor.to(device)
                )
                for name_of, tensor in tensors.items()
                if name_of.startswith(_MOMENT) and name_of.split(".", 2)[2] == name
            }
        torch.set_rng_state(tensors[_RNG + "cpu"])
        if device.type == "cuda" and _RNG + "cuda" in tensors:
            torch.cuda.set_rng_state(tensors[_RNG + "cuda"], device)
        self.step = int(counters["step"])
        self.tokens, self.seconds = int(counters["tokens"]), float(counters["seconds"])

    def counters(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        own = {id(p) for p in self.parameters}
        return [(name, p) for name, p in self.draft.named_parameters() if id(p) in own]

    def _device(self) -> torch.device:
        return self.parameters[0].device
