"""A first draft for a target: vocabulary, weights and figures from captured general traffic."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.capture.record import Sample
from tide_platform.config import TideError, target_digest
from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import TargetParts, load_target_parts, new_draft, save_draft
from tide_platform.draft.prefix import fill_prefixes
from tide_platform.draft.vocab import choose_vocabulary, count_tokens, coverage, inverse_map
from tide_platform.evaluation.replay import acceptance_by_position, acceptance_length, replay
from tide_platform.training.data import Example, prepare_all
from tide_platform.training.trainer import StepRecord, train

REPLAY_K = 4


class TooFewSamples(TideError):
    """Too little was captured to hold some of it out."""

    def __init__(self, samples: int, needed: int):
        super().__init__(
            f"{samples} samples are too few to pretrain a draft on, at least {needed} are needed; "
            "capture more traffic"
        )
        self.samples, self.needed = samples, needed


@dataclass(frozen=True)
class PretrainPlan:
    """One-step warm-up first (cheap, and the unroll learns nothing before step 0 does), then the whole
    unroll.
    """

    vocab_size: int  # of the draft
    epochs_one_step: int
    epochs: int
    learning_rate_one_step: float
    learning_rate: float
    held_out: int  # samples, at most
    seed: int


def pretrain(
    samples: Sequence[Sample],
    target_folder: Path,
    aux_layer_ids: tuple[int, ...],
    out: Path,
    plan: PretrainPlan,
    settings: Training,
    on_step: Callable[[str, StepRecord], None] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Writes the draft to ``out`` and its figures to ``out`` + ``.figures.json``; returns the figures.

    Held-out samples, chosen by the hash of their request, give the replayed acceptance and nothing else.
    Raises :class:`TooFewSamples`.
    """
    held_out, used = split(fill_prefixes(samples), plan.held_out)
    target = load_target_parts(target_folder)
    vocab = target.embed_VH.shape[0]
    counts = count_tokens((response(s) for s in used), vocab)
    chosen = choose_vocabulary(counts, min(plan.vocab_size, vocab))
    draft = new_draft(target, chosen, aux_layer_ids, plan.seed)
    t2d = draft.t2d.numpy()
    examples, skipped = prepare_all(
        used, inverse_map(draft.d2t.numpy(), vocab), settings.unroll_steps, settings.max_length
    )
    tokens = sum(e.response_tokens for e in examples)
    say(f"{len(examples)} samples, {tokens} response tokens; held out {len(held_out)}")
    figures: dict[str, Any] = {
        "samples": len(examples),
        "skipped": skipped,
        "response_tokens": tokens,
        "draft_vocab_size": len(chosen),
        "coverage": coverage(counts, t2d),
        "held_out": {
            "samples": len(held_out),
            "coverage": coverage(count_tokens((response(s) for s in held_out), vocab), t2d),
        },
        "stages": [],
    }
    stages = [
        ("one step", 1, plan.epochs_one_step, plan.learning_rate_one_step),
        ("unrolled", settings.unroll_steps, plan.epochs, plan.learning_rate),
    ]
    for name, steps, epochs, rate in stages:
        if not epochs:
            continue
        stage = settings.model_copy(update={"unroll_steps": steps, "epochs": epochs, "learning_rate": rate})
        began = time.monotonic()
        records = train(
            draft,
            target.embed_VH,
            [first_steps(e, steps) for e in examples],
            stage,
            plan.seed,
            (lambda r, name=name: on_step(name, r)) if on_step else None,
        )
        held = acceptance(draft, target, held_out)
        figures["stages"].append({
            "name": name, "unroll_steps": steps, "epochs": epochs, "learning_rate": rate,
            "tokens": records[-1].tokens, "seconds": round(time.monotonic() - began, 1),
            "loss": records[-1].loss,
            "held_out": held,
        })  # fmt: skip
        say(f"{name}: held-out acceptance length {held['acceptance_length']}")
    figures["held_out"] |= acceptance(draft, target, held_out)
    figures["digest"] = save_draft(
        out,
        draft,
        {"made_by": "tide draft pretrain", "target_digest": target_digest(target_folder), "figures": figures},
    )
    out.with_name(out.name + ".figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def split(samples: Sequence[Sample], held_out: int) -> tuple[list[Sample], list[Sample]]:
    """``(held out, used)``: by the hash of the request, about 5 % and at most ``held_out``."""
    if len(samples) < 20:
        raise TooFewSamples(len(samples), 20)
    order = sorted(samples, key=lambda s: hashlib.sha256(s.meta.request_id.encode()).digest())
    count = max(1, min(held_out, len(samples) // 20))
    requests = {s.meta.request_id for s in order[:count]}
    return [s for s in samples if s.meta.request_id in requests], [
        s for s in samples if s.meta.request_id not in requests
    ]


def response(sample: Sample) -> np.ndarray:
    """The response's tokens: the only ones that a draft proposes."""
    return sample.tensors["input_ids"][max(0, sample.meta.prompt_tokens - sample.meta.start_pos) :]


def first_steps(example: Example, steps: int) -> Example:
    """The same example for a shorter unroll."""
    return replace(example, supervised=example.supervised[:steps])


def acceptance(draft: Any, target: TargetParts, samples: Sequence[Sample]) -> dict[str, Any]:
    """Replayed acceptance length for each k, and by position at the largest."""
    replays = replay(draft, target, samples, REPLAY_K)
    return {
        "acceptance_length": {k: round(acceptance_length(replays, k), 4) for k in range(1, REPLAY_K + 1)},
        "acceptance_by_position": [round(a, 4) for a in acceptance_by_position(replays, REPLAY_K)],
    }
