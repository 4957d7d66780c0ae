"""A first draft for a target: vocabulary, weights and figures from captured general traffic.

Interrupted, it goes on where it was: its runs are kept in ``OUT.run`` until the draft is written.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.capture.record import Sample, SampleMeta
from tide_platform.config import TideError, target_digest
from tide_platform.config.locks import locked
from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import TargetParts, load_target_parts, new_draft, save_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.vocab import choose_vocabulary, count_tokens, coverage, inverse_map, map_digest
from tide_platform.evaluation.replay import acceptance_by_position, acceptance_length, replay
from tide_platform.training import provenance
from tide_platform.training.data import NothingToTrain
from tide_platform.training.job import MOST_NAMED
from tide_platform.training.loader import Loader
from tide_platform.training.plan import Expected, count, expected, plan_run
from tide_platform.training.progress import StepRecord
from tide_platform.training.recovery import Recovery
from tide_platform.training.samples import Samples
from tide_platform.training.teacher import Heads
from tide_platform.training.trainer import fit

REPLAY_K = 4
_LEAST = 20


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

    def stages(self, settings: Training) -> dict[str, Training]:
        """Name -> settings of the optimizer's runs, one after another; those of no epoch are left out."""
        of = {
            "one step": {
                "unroll_steps": 1,
                "epochs": self.epochs_one_step,
                "learning_rate": self.learning_rate_one_step,
            },
            "unrolled": {"epochs": self.epochs, "learning_rate": self.learning_rate},
        }
        return {
            name: settings.model_copy(update=changes) for name, changes in of.items() if changes["epochs"]
        }


@dataclass(frozen=True)
class Hooks:
    """Who is told, and who may end it."""

    on_step: Callable[[str, StepRecord], None] = lambda stage, record: None
    say: Callable[[str], None] = print
    stop: Callable[[], bool] = lambda: False


def pretrain(
    samples: Samples,
    target_folder: Path,
    aux_layer_ids: tuple[int, ...],
    out: Path,
    plan: PretrainPlan,
    settings: Training,
    hooks: Hooks = Hooks(),
    fresh: bool = False,
) -> dict[str, Any]:
    """Writes the draft to ``out`` and its figures to ``out`` + ``.figures.json``; returns the figures.

    Held-out samples, chosen by the hash of their request, give the replayed acceptance and nothing else.
    ``fresh`` drops what an interrupted call left. Raises :class:`TooFewSamples`, the errors of
    :mod:`tide_platform.training.recovery` and those of :func:`~tide_platform.training.trainer.fit`.
    """
    held_out, used = split(samples.metas, plan.held_out)
    work = out.absolute().with_name(out.name + ".run")
    work.mkdir(parents=True, exist_ok=True)
    with locked(work / ".lock"):
        if fresh:
            for folder in work.glob("*/"):
                shutil.rmtree(folder)
        target = load_target_parts(target_folder)
        counts = _count(samples, used, len(target.embed_VH))
        chosen = choose_vocabulary(counts, min(plan.vocab_size, len(counts)))
        draft = new_draft(target, chosen, aux_layer_ids, plan.seed)
        told = {
            "target_digest": target_digest(target_folder),
            "map_digest": map_digest(draft.d2t.numpy()),
            "tide-platform": provenance.package_version(),
            "sample_ids": provenance.ids_digest(samples.metas[i].sample_id for i in used),
            **{f"plan.{name}": value for name, value in asdict(plan).items()},
        }
        of_held_out = _count(samples, held_out, len(target.embed_VH))
        figures = {
            "draft_vocab_size": len(chosen),
            "coverage": coverage(counts, draft.t2d.numpy()),
            "held_out": {"samples": len(held_out), "coverage": coverage(of_held_out, draft.t2d.numpy())},
        }
        run = _Pretraining(samples, used, target, draft, work, told, plan.seed, hooks)
        judged = [item for item in samples.load(held_out) if isinstance(item, Sample)]
        hooks.say(f"{len(used)} samples; held out {len(judged)}")
        _stages(run, plan.stages(settings), judged, figures)
        figures["digest"] = save_draft(out, draft, _told(told, settings, figures))
        out.with_name(out.name + ".figures.json").write_text(json.dumps(figures, indent=2) + "\n")
        shutil.rmtree(work)
    return figures


@dataclass(frozen=True)
class _Pretraining:
    """What all stages have in common."""

    samples: Samples
    used: list[int]
    target: TargetParts
    draft: Eagle3Draft
    work: Path
    told: dict[str, Any]  # decides the result, with a stage's own settings
    seed: int
    hooks: Hooks

    def stage(self, name: str, settings: Training) -> dict[str, Any]:
        """Trains the draft; the stage's figures."""
        metas = self.samples.metas
        sizes = {i: expected(metas[i], settings.unroll_steps, settings.max_length) for i in self.used}
        short = {metas[i].sample_id: size for i, size in sizes.items() if isinstance(size, str)}
        sized = {i: size for i, size in sizes.items() if isinstance(size, Expected)}
        if not sized:
            raise NothingToTrain(count(short.values()))
        epochs = [range(len(sized))] * settings.epochs
        plan = plan_run(list(sized.values()), epochs, settings.batch_size, self.seed)
        inverse = inverse_map(self.draft.d2t.numpy(), len(self.target.embed_VH))
        heads = Heads.of(settings.teacher, self.target, self.draft)
        loader = Loader(self.samples, list(sized), inverse, settings, heads)
        decisive = {f"training.{key}": value for key, value in provenance.decisive(settings).items()}
        contract = {**self.told, **decisive, "steps": len(plan.steps), "plan": plan.digest}
        noted = provenance.machine(settings, "cpu") | provenance.code_version()
        folder = self.work / name.replace(" ", "-")
        with closing(Recovery(folder, contract, noted, settings.checkpoint_seconds)) as recovery:
            records = fit(
                self.draft, self.target.embed_VH, plan, loader, settings, self.seed,
                on_step=lambda record: self.hooks.on_step(name, record),
                recovery=recovery, skipped=loader.skipped, stop=self.hooks.stop, heads=heads,
            )  # fmt: skip
        left_out = short | loader.skipped
        return {
            "name": name,
            "samples": len(sized) - len(loader.skipped),
            "skipped": count(left_out.values()),
            "skipped_samples": dict(sorted(left_out.items())[:MOST_NAMED]),
            "unroll_steps": settings.unroll_steps,
            "epochs": settings.epochs,
            "learning_rate": settings.learning_rate,
            "tokens": records[-1].tokens,
            "seconds": round(records[-1].seconds, 1),
            "loss": records[-1].loss,
        }


def _stages(
    run: _Pretraining, stages: dict[str, Training], judged: list[Sample], figures: dict[str, Any]
) -> None:
    """All stages in order, each judged; adds to ``figures``."""
    figures["stages"] = []
    held: dict[str, Any] = {}
    for name, settings in stages.items():
        began = time.monotonic()
        of_stage = run.stage(name, settings)
        held = acceptance(run.draft, run.target, judged)
        of_stage |= {"wall_seconds": round(time.monotonic() - began, 1), "held_out": held}
        figures["stages"].append(of_stage)
        figures |= {key: of_stage[key] for key in ("samples", "skipped")}
        figures["response_tokens"] = of_stage["tokens"] // settings.epochs
        run.hooks.say(f"{name}: held-out acceptance length {held['acceptance_length']}")
    figures["held_out"] |= held or acceptance(run.draft, run.target, judged)


def _told(told: dict[str, Any], settings: Training, figures: dict[str, Any]) -> dict[str, Any]:
    """The draft's ``tide.json``."""
    return {
        "made_by": "tide draft pretrain",
        **told,
        "training": settings.model_dump(),
        "machine": provenance.machine(settings, "cpu"),
        "code": provenance.code_version(),
        "figures": figures,
    }


def split(metas: Sequence[SampleMeta], held_out: int) -> tuple[list[int], list[int]]:
    """Indices ``(held out, used)``: by the hash of the request, about 5 % and at most ``held_out``."""
    if len(metas) < _LEAST:
        raise TooFewSamples(len(metas), _LEAST)
    order = sorted(metas, key=lambda meta: hashlib.sha256(meta.request_id.encode()).digest())
    size = max(1, min(held_out, len(metas) // 20))
    requests = {meta.request_id for meta in order[:size]}
    inside = [i for i, meta in enumerate(metas) if meta.request_id in requests]
    return inside, sorted(set(range(len(metas))) - set(inside))


def acceptance(draft: Any, target: TargetParts, samples: Sequence[Sample]) -> dict[str, Any]:
    """Replayed acceptance length for each k, and by position at the largest."""
    replays = replay(draft, target, samples, REPLAY_K)
    return {
        "acceptance_length": {k: round(acceptance_length(replays, k), 4) for k in range(1, REPLAY_K + 1)},
        "acceptance_by_position": [round(a, 4) for a in acceptance_by_position(replays, REPLAY_K)],
    }


def _count(samples: Samples, chosen: list[int], vocab: int) -> np.ndarray:
    """How often each target id occurs in the responses, the only tokens that a draft proposes: int64 [V]."""
    metas = (samples.metas[i] for i in chosen)
    responses = (
        tokens[max(0, meta.prompt_tokens - meta.start_pos) :]
        for meta, tokens in zip(metas, samples.tokens(chosen), strict=True)
    )
    return count_tokens(responses, vocab)
