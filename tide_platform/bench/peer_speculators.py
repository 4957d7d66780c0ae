"""vLLM's ``speculators`` as the peer of ``tide bench train``: its model, eager loss and collation, in a loop
of its shape (speculators 0.9.0, train/trainer.py: forward, backward, clip, step).

Run by the Python of ``.venv-peers``, by file name: nothing of the project is imported. ``python
peer_speculators.py SPEC.json`` reads tensors from safetensors and writes ``<out>/result.json``, and what else
the spec's ``mode`` says: ``probe`` times one step for each attention and pack size, ``logits`` writes those
of one batch, ``train`` the trained draft. Its trainer class asks for an accelerator, so it is not called.

Shapes: T tokens of a sample, L of a pack (its samples one after another), H hidden size, Vd draft vocabulary.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig
from transformers import LlamaConfig

ATTENTIONS = ("eager", "sdpa")  # its default, flex attention, has no backward pass on a CPU


def build(spec: dict[str, Any], attention: str) -> Eagle3DraftModel:
    """Its model with the given weights. ``weights`` holds every tensor of its state but the verifier's norm:
    the captured last hidden states are behind that norm, so it is left out.
    """
    shape = spec["draft"]
    layer = LlamaConfig(**shape["layer"])
    layer._attn_implementation = attention
    proposal = GreedyTokenProposalConfig(speculative_tokens=spec["unroll_steps"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab_size"],
        fc_norm=shape["fc_norm"],
        norm_output=shape["norm_output"],
        eagle_aux_hidden_state_layer_ids=shape["aux_layer_ids"],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config)
    missing, unexpected = model.load_state_dict(load_file(spec["weights"]), strict=False)
    if unexpected or set(missing) != {"verifier_norm.weight"}:
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.verifier_norm = torch.nn.Identity()
    model.lm_head.weight.requires_grad = True
    return model


def read_features(path: str) -> list[dict[str, torch.Tensor]]:
    """One dict a sample, as its dataset makes them (train/data.py, BaseDataset.__getitem__)."""
    samples: list[dict[str, torch.Tensor]] = []
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        while f"{len(samples)}.input_ids" in names:
            i = len(samples)
            one = {
                name: file.get_tensor(f"{i}.{name}")
                for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask")
            }
            length = len(one["input_ids"])
            one["lengths"] = torch.tensor([length], dtype=torch.long)
            one["position_ids"] = torch.arange(length, dtype=torch.long)
            samples.append(one)
    return samples


class Steps:
    """Optimizer steps of its shape on packs of samples."""

    def __init__(self, spec: dict[str, Any], attention: str):
        self.spec, self.model = spec, build(spec, attention)
        self.dtype = torch.bfloat16 if spec["autocast"] else torch.float32
        config = TrainerConfig(
            lr=0.0, num_epochs=1, save_path="", optimizer="adamw", weight_decay=spec["weight_decay"]
        )
        (self.optimizer,) = build_optimizers(self.model, config)
        for group in self.optimizer.param_groups:
            group["betas"] = tuple(spec["betas"])
        self.call = {
            "ttt_steps": spec["unroll_steps"],
            "ttt_step_loss_decay": spec["decay"],
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """One pack, just as long as its samples: no padding is charged to it."""
        length = sum(len(sample["input_ids"]) - 1 for sample in samples)
        hidden = self.spec["draft"]["layer"]["hidden_size"]
        return CollateFn(length, hidden, dtype=self.dtype, preprocess=shift_batch)(samples)

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.spec["autocast"]):
            _, loss, metrics = self.model(**batch, **self.call)
        return loss, metrics

    def step(self, samples: Sequence[dict[str, torch.Tensor]], rate: float) -> tuple[float, list[int]]:
        """Loss, and the positions that its mask lets count in each unroll step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.collate(samples)
        loss, _ = self.forward(batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec["max_grad_norm"])
        self.optimizer.step()
        return float(loss.detach()), supervised(batch["loss_mask"], self.spec["unroll_steps"])


def supervised(mask: torch.Tensor, steps: int) -> list[int]:
    """Its count (models/eagle3/metrics.py, align_for_step): the mask behind the first j positions."""
    return [int(mask[:, j:].sum()) for j in range(steps)]


def probe(spec: dict[str, Any], samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Seconds of the second of two steps: of each attention with the largest pack, and of the fastest one
    with each other pack size.
    """
    *others, largest = spec["pack_sizes"]
    found = [_probed(spec, samples, attention, largest) for attention in ATTENTIONS]
    best = min(found, key=lambda one: one["seconds"])["attention"]
    return {"probes": [*found, *(_probed(spec, samples, best, size) for size in others)]}


def _probed(
    spec: dict[str, Any], samples: list[dict[str, torch.Tensor]], attention: str, size: int
) -> dict[str, Any]:
    steps, chosen = Steps(spec, attention), [samples[i] for i in spec["steps"][0][:size]]
    steps.step(chosen, 0.0)
    began = time.perf_counter()
    _, counts = steps.step(chosen, 0.0)
    seconds = time.perf_counter() - began
    return {"attention": attention, "samples": size, "seconds": seconds, "supervised": counts}


def logits(spec: dict[str, Any], samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Logits [S, L, Vd] of the first step's pack, its loss and each unroll step's, before any update."""
    steps = Steps(spec, spec["attention"])
    taken: list[torch.Tensor] = []
    steps.model.lm_head.register_forward_hook(
        lambda _module, _given, out: taken.append(out[0].detach().float())
    )
    batch = steps.collate([samples[i] for i in spec["steps"][0]])
    loss, metrics = steps.forward(batch)
    save_file({"logits": torch.stack(taken)}, Path(spec["out"]) / "logits.safetensors")
    each = [float(metrics[f"loss_{j}_sum"]) for j in range(spec["unroll_steps"])]
    return {"loss": float(loss.detach()), "losses": each}


def train(spec: dict[str, Any], samples: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """All steps; ``seconds`` and CPU seconds of each, its collation included."""
    steps = Steps(spec, spec["attention"])
    steps.model.train()
    seconds, cpu, counts, losses = [], [], [], []
    for chosen, rate in zip(spec["steps"], spec["learning_rates"], strict=True):
        began, began_cpu = time.perf_counter(), time.process_time()
        loss, positions = steps.step([samples[i] for i in chosen], rate)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
        losses.append(loss)
        counts.append(positions)
    if spec["save"]:
        steps.model.save_pretrained(Path(spec["out"]) / "draft")
    return {"seconds": seconds, "cpu_seconds": cpu, "supervised": counts, "losses": losses}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(spec["seed"])
    torch.set_num_threads(spec["threads"])
    out = Path(spec["out"])
    out.mkdir(parents=True, exist_ok=True)
    modes = {"probe": probe, "logits": logits, "train": train}
    result = modes[spec["mode"]](spec, read_features(spec["features"]))
    result["threads"] = torch.get_num_threads()
    work = out / "result.json.new"
    work.write_text(json.dumps(result) + "\n")
    work.replace(out / "result.json")


if __name__ == "__main__":
    main()
