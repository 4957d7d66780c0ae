"""The other side of ``tide bench train``: ``speculators``, called in an environment of its own.

What goes over is safetensors and JSON. The draft's weights are renamed, never rescaled, and the renaming is
proven before anything is timed: on one batch both sides give the same logits and the same loss.

Shapes: S unroll steps, C positions of a sample (tokens - 1), Vd draft vocabulary, H hidden size.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tide_platform.config import Settings, TideError
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft, Unroll
from tide_platform.training.objective import DECAY

SCRIPT = Path(__file__).with_name("peer_speculators.py")
PYTHON = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
TOLERANCE = 1e-3  # of the largest logit, and of the loss: fp32 on both sides, sums in another order
_LAYER = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LAYER += ("rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act", "rope_parameters")


class PeerMissing(TideError):
    """The peer's environment is not there."""

    def __init__(self, python: Path):
        super().__init__(f"{python}: not there; install the peers with `make setup-peers`")
        self.python = python


class PeerFailed(TideError):
    """The peer's process ended with an error."""

    def __init__(self, log: Path, status: int):
        lines = log.read_text(errors="replace").strip().splitlines()
        end = lines[-1] if lines else "(no output)"
        super().__init__(f"the peer ended with status {status}; its log: {log}; its end: {end}")
        self.log, self.status = log, status


class NotTheSameDraft(TideError):
    """Converted weights give other logits, or another loss: the two would not be compared on one draft."""

    def __init__(self, what: str, found: float):
        super().__init__(f"peer and trainer differ on the same batch: {what} by {found:.2g} of its size")
        self.what, self.found = what, found


@dataclass(frozen=True)
class Recipe:
    """What both sides are told of the optimizer; one learning rate a step."""

    steps: list[list[int]]  # indices of each step's samples
    learning_rates: list[float]
    betas: tuple[float, float]


def recipe(examples: Sequence[Any], settings: Settings, seed: int) -> Recipe:
    """Batches and rates of ``training.trainer.train`` for these examples, as it would take them."""
    from tide_platform.training.plan import plan_run
    from tide_platform.training.schedule import learning_rate
    from tide_platform.training.state import BETAS

    training = settings.training
    plan = plan_run(examples, [range(len(examples))] * training.epochs, training.batch_size, seed)
    steps = [list(step.samples) for step in plan.steps]
    rates = [learning_rate(number, len(steps), training) for number in range(len(steps))]
    return Recipe(steps, rates, BETAS)


def weights(draft: Eagle3Draft, target: TargetParts) -> dict[str, torch.Tensor]:
    """The state of the peer's model, fp32: the draft's tensors under its names, the target's embeddings, and
    the rows of the target's head that the draft's vocabulary has.
    """
    ids = draft.d2t + torch.arange(len(draft.d2t))
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor.detach().clone()
        for name, tensor in draft.state_dict().items()
    }
    if draft.config.draft_vocab_size == draft.config.vocab_size:
        del tensors["d2t"], tensors["t2d"]  # it has none then
    tensors["embed_tokens.weight"] = target.embed_VH.float()
    tensors["verifier_lm_head.weight"] = target.lm_head_VH[ids].float()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def shape(draft: Eagle3Draft) -> dict[str, Any]:
    """The draft's shape in the peer's words."""
    raw = draft.config.to_json()
    layer = {name: raw[name] for name in _LAYER}
    layer |= {"num_hidden_layers": 1, "attention_bias": False, "mlp_bias": False, "pad_token_id": None}
    return {
        "layer": layer | {"tie_word_embeddings": False},
        "draft_vocab_size": draft.config.draft_vocab_size,
        "fc_norm": draft.config.fc_norm,
        "norm_output": draft.config.norm_output,
        "aux_layer_ids": list(draft.config.aux_layer_ids),
    }


def call(mode: str, spec: dict[str, Any], out: Path) -> dict[str, Any]:
    """Runs the peer once; its result. Raises :class:`PeerMissing`, :class:`PeerFailed`."""
    if not PYTHON.exists():
        raise PeerMissing(PYTHON)
    out.mkdir(parents=True, exist_ok=True)
    given, log = out / "spec.json", out / "peer.log"
    given.write_text(json.dumps(spec | {"mode": mode, "out": str(out)}))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(spec["threads"])}
    with log.open("w") as file:
        done = subprocess.run([PYTHON, SCRIPT, given], stdout=file, stderr=file, env=env, check=False)
    if done.returncode:
        raise PeerFailed(log, done.returncode)
    return json.loads((out / "result.json").read_text())


def check_conversion(
    draft: Eagle3Draft, target: TargetParts, batch: dict[str, torch.Tensor], chosen: Sequence[int], out: Path
) -> dict[str, float]:
    """Compares what the peer wrote in mode ``logits`` with our model on the same features, in fp32; the
    largest differences. Raises :class:`NotTheSameDraft`.
    """
    theirs = load_file(out / "logits.safetensors")["logits"]  # [S, L, Vd], the samples one after another
    result = json.loads((out / "result.json").read_text())
    head = target.lm_head_VH[draft.d2t + torch.arange(len(draft.d2t))].float()
    steps, at, worst = len(theirs), 0, 0.0
    largest = float(theirs.abs().max())
    sums, counts = [0.0] * steps, [0] * steps
    for i in chosen:
        of = {name: batch[f"{i}.{name}"] for name in ("input_ids", "hidden_states", "loss_mask")}
        ours = full_logits(draft, target.embed_VH, of["input_ids"], of["hidden_states"], steps)
        length = ours.shape[1]
        states = batch[f"{i}.verifier_last_hidden_states"][1:].float()
        mask = of["loss_mask"][1:]
        for j in range(steps):
            count = length - j  # a chain's step j of a later position leaves the sample
            difference = (ours[j, :count] - theirs[j, at : at + count]).abs().max()
            worst = max(worst, float(difference) / largest)
            rows = mask[j:].nonzero()[:, 0]
            log_q = F.log_softmax(ours[j, rows], -1)
            p = F.softmax(states[rows + j] @ head.T, -1)
            sums[j] += float(F.kl_div(log_q, p, reduction="sum"))
            counts[j] += len(rows)
        at += length
    if worst > TOLERANCE:
        raise NotTheSameDraft("logits", worst)
    losses = [DECAY**j * total / count for j, (total, count) in enumerate(zip(sums, counts, strict=True))]
    off = max(abs(a - b) / b for a, b in zip(losses, result["losses"], strict=True))
    if off > TOLERANCE:
        raise NotTheSameDraft("loss", off)
    return {"logits": worst, "loss": off, "loss_of_the_batch": sum(losses)}


@torch.inference_mode()
def full_logits(
    draft: Eagle3Draft, embed_VH: torch.Tensor, tokens_T: torch.Tensor, aux_TF: torch.Tensor, steps: int
) -> torch.Tensor:
    """Logits [S, C, Vd] of every unroll step at every position but the last; past the sample's end the tokens
    are 0.
    """
    count = len(tokens_T) - 1
    positions = torch.arange(count)[None]
    unroll = Unroll(draft, positions, torch.ones(1, count, dtype=torch.bool), count)
    shifted = torch.cat([tokens_T, torch.zeros(steps, dtype=torch.int64)])
    embeds = [F.embedding(shifted[1 + j : 1 + j + count], embed_VH.float())[None] for j in range(steps)]
    hidden = [unroll.first(embeds[0], aux_TF[None, :count])]
    for j in range(1, steps):
        hidden.append(unroll.next(embeds[j], hidden[-1]))
    return torch.stack([draft.lm_head(draft.norm(h))[0] for h in hidden])
