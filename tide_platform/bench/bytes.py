"""Bytes a captured training token against acceptance after adaptation, by how the aux states are stored.

Samples are captured once, as bf16 with the widest teacher. Each run then stores a window's samples in one
format, packed and unpacked as spool and dataset do it, fine-tunes the base draft on them with the
deployment's own recipe, and judges the result by replay on held_out prompts as the server saw them. Every
run's outcome is a file: an interrupted experiment goes on where it was.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.bench.captured import captured
from tide_platform.bench.counts import compare_counts, counts_of
from tide_platform.bench.report import Report
from tide_platform.capture.packing import AuxFormat, pack, unpack
from tide_platform.capture.record import Sample
from tide_platform.capture.split import REFERENCE_TENANT
from tide_platform.config import Settings
from tide_platform.config.files import write_json

WORKLOADS = ("maths", "code")
SEEDS = (0, 1, 2)
K = 2  # draft steps that are judged
NEW_TOKENS, CONCURRENCY = 96, 16
WINDOW, REFERENCE, HELD_OUT, GENERAL = 128, 128, 48, 32  # samples
_HELD_OUT = "-held"  # the tenant of held_out prompts: captured in this experiment only
_GENERAL_HELD_OUT = "general" + _HELD_OUT


@dataclass(frozen=True)
class Form:
    """How a window's samples are stored: their aux states, and the teacher's width."""

    aux: AuxFormat
    teacher_k: int

    @property
    def name(self) -> str:
        return f"{self.aux}_k{self.teacher_k}"


BASE = Form("bf16", 64)  # what the others are compared with
FORMS = (BASE, Form("int8", 64), Form("int4", 64), Form("int4", 16))


def run(
    settings: Settings,
    folder: Path,
    *,
    workloads: Sequence[str] = WORKLOADS,
    forms: Sequence[Form] = FORMS,
    seeds: Sequence[int] = SEEDS,
    most: int | None = None,
    say: Callable[[str], None],
) -> Report:
    """Captures into ``folder`` what is not there, does at most ``most`` of the runs that are left (the first
    seed of everything comes first) and reports on all that are done.

    ``ratios``: ``bytes_<workload>_<form>``, bytes a training token over 3 aux + last hidden in bf16;
    ``acceptance_<workload>_<form>`` and ``general_<workload>_<form>``, acceptance length after adaptation
    over bf16's, sums over the seeds, with intervals over requests. Raises
    :class:`~tide_platform.bench.captured.NotCaptured`.
    """
    samples = collect(settings, folder, workloads, say)
    files = {
        folder / "runs" / f"{workload}-{form.name}-{seed}.json": (workload, form, seed)
        for seed, workload, form in product(seeds, workloads, forms)
    }
    left = [path for path in files if not path.exists()]
    for path in left[:most]:
        workload, form, seed = files[path]
        outcome = adapt(settings, samples, workload, form, seed)
        write_json(path, outcome)
        lengths = f"{outcome['acceptance_length']:.3f}, general {outcome['general']:.3f}"
        say(f"{workload} {form.name} seed {seed}: {lengths}, {outcome['seconds']:.0f} s")
    return summarize([json.loads(path.read_text()) for path in files if path.exists()], forms)


def collect(
    settings: Settings, folder: Path, workloads: Sequence[str], say: Callable[[str], None]
) -> dict[str, list[Sample]]:
    """Samples by tenant: of each workload and its held_out prompts, of the reference and general held_out
    ones.
    """
    from tide_platform.serving.workloads import load_workload

    general = load_workload("general", "traffic")
    prompts = {
        REFERENCE_TENANT: general[-REFERENCE:],
        _GENERAL_HELD_OUT: load_workload("general", "held_out", GENERAL),
    }
    for workload in workloads:
        prompts[workload] = load_workload(workload, "traffic", WINDOW)
        prompts[workload + _HELD_OUT] = load_workload(workload, "held_out", HELD_OUT)
    plain = settings.model_copy(deep=True)
    plain.serving.k, plain.serving.radix_cache = K, False  # no holes: they would blur what is compared
    plain.capture.teacher_k = 128
    return captured(plain, folder, prompts, new_tokens=NEW_TOKENS, concurrency=CONCURRENCY, say=say)


def stored(sample: Sample, form: Form) -> Sample:
    """As the dataset holds it: aux states packed, the teacher's first ``form.teacher_k`` columns."""
    narrow = {
        name: np.ascontiguousarray(sample.tensors[name][:, : form.teacher_k])
        for name in ("teacher_ids", "teacher_logp")
    }
    return pack(Sample(sample.meta, sample.tensors | narrow), form.aux)


def sizes(samples: Iterable[Sample], form: Form) -> tuple[int, int]:
    """Bytes of the stored tensors, and training tokens (captured rows), of ``samples``."""
    total = tokens = 0
    for sample in samples:
        total += sum(tensor.nbytes for tensor in stored(sample, form).tensors.values())
        tokens += len(sample.tensors["row_pos"])
    return total, tokens


def adapt(
    settings: Settings, samples: dict[str, list[Sample]], workload: str, form: Form, seed: int
) -> dict[str, Any]:
    """One run: the window of ``workload`` in ``form``, trained and judged. JSON-able."""
    from tide_platform.draft.checkpoint import load_draft, load_target_parts
    from tide_platform.draft.vocab import inverse_map
    from tide_platform.evaluation.acceptance import acceptance_length
    from tide_platform.evaluation.replay import replay
    from tide_platform.serving.drafts import resolve_draft
    from tide_platform.serving.target import resolve_target
    from tide_platform.training.data import prepare_all
    from tide_platform.training.trainer import train

    began = time.monotonic()
    recipe = settings.training
    target, draft = load_target_parts(resolve_target(settings)), load_draft(resolve_draft(settings))
    window = samples[workload]
    features = window[0].tensors["aux"].shape[1]
    reference = samples[REFERENCE_TENANT][: round(recipe.reference_ratio * len(window))]
    narrow = Form("bf16", form.teacher_k)  # the reference's aux states are never packed
    seen = [unpack(stored(sample, form), features) for sample in window]
    seen += [stored(sample, narrow) for sample in reference]
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    examples, _ = prepare_all(seen, inverse, recipe.unroll_steps, recipe.max_length)
    train(draft, target.embed_VH, examples, recipe, seed)
    total, tokens = sizes(window, form)
    judged = {of: replay(draft, target, samples[of], K) for of in (workload + _HELD_OUT, _GENERAL_HELD_OUT)}
    own, general = judged[workload + _HELD_OUT], judged[_GENERAL_HELD_OUT]
    return {
        "workload": workload,
        "form": form.name,
        "seed": seed,
        "acceptance_length": acceptance_length(own, K),
        "general": acceptance_length(general, K),
        "bytes_a_token": total / tokens,
        "published_bytes_a_token": features // 3 * 8,  # 3 aux + last hidden, bf16
        "requests": {"own": counts_of(own, K), "general": counts_of(general, K)},
        "seconds": time.monotonic() - began,
    }


def summarize(runs: Sequence[dict[str, Any]], forms: Sequence[Form]) -> Report:
    """The report on the runs done so far; a form is compared over the seeds that bf16 has as well."""
    report = Report("bytes", {}, raw={"runs": list(runs)})
    for workload in dict.fromkeys(run["workload"] for run in runs):
        of_base = _by_seed(runs, workload, BASE)
        for form in forms:
            these = _by_seed(runs, workload, form)
            if not these:
                continue
            name, some = form.name, next(iter(these.values()))
            report.ratios[f"bytes_{workload}_{name}"] = (
                some["bytes_a_token"] / some["published_bytes_a_token"]
            )
            common = sorted(these.keys() & of_base.keys())
            if form == BASE or not common:
                continue
            for what, key in (("acceptance", "own"), ("general", "general")):
                case = f"{what}_{workload}_{name}"
                report.ratios[case], report.intervals[case] = compare_counts(
                    [of_base[seed]["requests"][key] for seed in common],
                    [these[seed]["requests"][key] for seed in common],
                )
    return report


def _by_seed(runs: Sequence[dict[str, Any]], workload: str, form: Form) -> dict[int, dict[str, Any]]:
    return {run["seed"]: run for run in runs if (run["workload"], run["form"]) == (workload, form.name)}
