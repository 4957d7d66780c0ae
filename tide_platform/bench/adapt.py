"""How much of a workload a draft must see: acceptance by the number of samples, and the speed it brings.

Traffic of a workload is captured once. For each number of samples the shipped draft is fine-tuned on so many
of them with the deployment's recipe, and judged by acceptance replay on held_out prompts (maths: of other
templates than the traffic's) and on general ones. The draft of the most samples then runs on live servers, in
turn with the static draft and with no speculation. Every finished piece is a file: an interrupted experiment
goes on where it was.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_platform.bench.captured import captured
from tide_platform.bench.counts import Counts, compare_counts
from tide_platform.bench.report import Report
from tide_platform.capture.record import Sample
from tide_platform.capture.split import REFERENCE_TENANT
from tide_platform.config import Settings, TideError
from tide_platform.config.files import write_json

WORKLOADS = ("maths", "code")
SIZES = (64, 128, 256, 512, 1024)
HELD_OUT, NEW_TOKENS, CONCURRENCY = 64, 96, 32
K_MAX = 5  # replay judges every k up to here
_HELD = "-held"  # the tenant of held_out prompts: captured in this experiment only
STATIC = 0  # samples that the shipped draft has seen of the workload


class TooFewPrompts(TideError):
    """A workload has fewer prompts than samples are asked for."""

    def __init__(self, workload: str, found: int, wanted: int):
        super().__init__(f"workload {workload} has {found} prompts in traffic, not {wanted}; lower --samples")
        self.workload, self.found, self.wanted = workload, found, wanted


class OtherRecipe(TideError):
    """What is in the folder was made with other settings of ``training``."""

    def __init__(self, path: Path, changed: Mapping[str, tuple[Any, Any]]):
        what = ", ".join(f"training.{name} {now}, it was {was}" for name, (was, now) in changed.items())
        super().__init__(f"{path}: made with another recipe ({what}); give another --folder, or remove it")
        self.path, self.changed = path, changed


def run(
    settings: Settings,
    folder: Path,
    *,
    workloads: Sequence[str] = WORKLOADS,
    sizes: Sequence[int] = SIZES,
    most: int | None = None,
    live: bool = True,
    say: Callable[[str], None],
) -> Report:
    """Does what is left of the experiment, at most ``most`` fine-tunings, and reports on all that is done.
    The folder is of one recipe a workload and size.

    ``ratios``: ``<workload>_<n>_k<k>``, acceptance length after ``n`` samples over the static draft's, and
    ``<workload>_<n>_general_k<k>``, the same on general prompts; with ``live``, what
    :mod:`tide_platform.bench.adapt_live` adds. Raises
    :class:`NotCaptured`, :class:`TooFewPrompts`, :class:`OtherRecipe`.
    """
    samples = collect(settings, folder, workloads, max(sizes), say)
    done = 0
    for workload in workloads:
        for size in (STATIC, *sizes):
            path = _outcome(folder, workload, size)
            if path.exists():
                _same_recipe(settings, size, path)
                continue
            if done == most:
                continue
            outcome = adapt(settings, samples, workload, size, _draft(folder, workload, size))
            write_json(path, outcome)
            done += size > STATIC
            own, general = (" ".join(f"{x:.3f}" for x in outcome[of]) for of in ("own", "general"))
            say(f"{workload} {size}: {own}; general {general}; {outcome['seconds']:.0f} s")
    report = summarize(folder, workloads, sizes)
    if live:
        from tide_platform.bench.adapt_live import measure

        for workload in workloads:
            if _outcome(folder, workload, max(sizes)).exists():
                measure(settings, folder, workload, _draft(folder, workload, max(sizes)), report, say)
    return report


def collect(
    settings: Settings, folder: Path, workloads: Sequence[str], most: int, say: Callable[[str], None]
) -> dict[str, list[Sample]]:
    """Samples by tenant, holes at their beginnings filled; bf16, as a judge must see them."""
    from tide_platform.draft.prefix import fill_prefixes
    from tide_platform.serving.workloads import load_workload

    share = round(settings.training.reference_ratio * most)
    prompts = {
        REFERENCE_TENANT: load_workload("general", "traffic")[-share:],
        "general" + _HELD: load_workload("general", "held_out", HELD_OUT),
    }
    for workload in workloads:
        prompts[workload + _HELD] = load_workload(workload, "held_out", HELD_OUT)
        prompts[workload] = load_workload(workload, "traffic", most)
        if len(prompts[workload]) < most:
            raise TooFewPrompts(workload, len(prompts[workload]), most)
    own = settings.model_copy(deep=True)
    own.serving.max_running_requests = max(CONCURRENCY, own.serving.max_running_requests)
    found = captured(own, folder, prompts, new_tokens=NEW_TOKENS, concurrency=CONCURRENCY, say=say)
    return {tenant: fill_prefixes(of) for tenant, of in found.items()}


def adapt(
    settings: Settings, samples: dict[str, list[Sample]], workload: str, size: int, out: Path
) -> dict[str, Any]:
    """One run: the shipped draft fine-tuned on ``size`` samples, written to ``out`` and judged. JSON-able."""
    from tide_platform.draft.checkpoint import load_draft, load_target_parts, save_draft
    from tide_platform.serving.drafts import resolve_draft
    from tide_platform.serving.target import resolve_target

    began = time.monotonic()
    target, draft = load_target_parts(resolve_target(settings)), load_draft(resolve_draft(settings))
    tokens = 0
    if size > STATIC:
        tokens = _train(settings, draft, target, samples, workload, size)
        save_draft(out, draft, {"made_by": "tide bench adapt", "workload": workload, "samples": size})
    own, own_counts = _judge(draft, target, samples[workload + _HELD])
    general, general_counts = _judge(draft, target, samples["general" + _HELD])
    return {
        "workload": workload,
        "samples": size,
        "tokens": tokens,
        "recipe": _recipe(settings, size),
        "own": own,
        "general": general,
        "counts": {"own": own_counts, "general": general_counts},
        "seconds": time.monotonic() - began,
    }


def _train(
    settings: Settings, draft: Any, target: Any, samples: dict[str, list[Sample]], workload: str, size: int
) -> int:
    """Response tokens trained on, all epochs. The window is held as the spool would store it."""
    from tide_platform.capture.packing import pack, unpack
    from tide_platform.draft.vocab import inverse_map
    from tide_platform.training.data import prepare_all
    from tide_platform.training.trainer import train

    recipe = settings.training
    features = samples[workload][0].tensors["aux"].shape[1]
    window = [unpack(pack(s, settings.capture.aux_format), features) for s in samples[workload][:size]]
    reference = samples[REFERENCE_TENANT][: round(recipe.reference_ratio * size)]
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    examples, _ = prepare_all([*window, *reference], inverse, recipe.unroll_steps, recipe.max_length)
    return train(draft, target.embed_VH, examples, recipe, recipe.seed)[-1].tokens


def _judge(
    draft: Any, target: Any, samples: Sequence[Sample]
) -> tuple[list[float], dict[str, list[list[float]]]]:
    """Acceptance length by k, and by request the rounds and accepted drafts of each k."""
    from tide_platform.evaluation.acceptance import acceptance_length
    from tide_platform.evaluation.replay import replay

    replays = replay(draft, target, samples, K_MAX)
    ks = range(1, K_MAX + 1)
    counts = {r.request_id: [[r.by_k[k].rounds, r.by_k[k].accepted] for k in ks] for r in replays}
    return [acceptance_length(replays, k) for k in ks], counts


def summarize(folder: Path, workloads: Sequence[str], sizes: Sequence[int]) -> Report:
    """The report on the runs done so far."""
    report = Report("adapt", {}, raw={"runs": []})
    for workload in workloads:
        paths = [path for size in (STATIC, *sizes) if (path := _outcome(folder, workload, size)).exists()]
        runs = [json.loads(path.read_text()) for path in paths]
        report.raw["runs"] += runs
        for run in runs[1:]:
            for k in range(1, K_MAX + 1):
                for name, of in (("", "own"), ("general_", "general")):
                    case = f"{workload}_{run['samples']}_{name}k{k}"
                    report.ratios[case] = run[of][k - 1] / runs[0][of][k - 1]
                    static, adapted = (_at(k, each["counts"][of]) for each in (runs[0], run))
                    _, report.intervals[case] = compare_counts([static], [adapted])
    return report


def _at(k: int, by_request: dict[str, list[list[float]]]) -> Counts:
    """What :func:`_judge` counted, at one ``k``."""
    return {request: by_k[k - 1] for request, by_k in by_request.items()}


def _outcome(folder: Path, workload: str, size: int) -> Path:
    return folder / "runs" / f"{workload}-{size}.json"


def _recipe(settings: Settings, size: int) -> dict[str, Any]:
    """The settings that decide the draft; none decides the static one."""
    from tide_platform.training.provenance import decisive

    return decisive(settings.training) if size > STATIC else {}


def _same_recipe(settings: Settings, size: int, path: Path) -> None:
    was, now = json.loads(path.read_text())["recipe"], _recipe(settings, size)
    if changed := {name: (was.get(name), now[name]) for name in now if was.get(name) != now[name]}:
        raise OtherRecipe(path, changed)


def _draft(folder: Path, workload: str, size: int) -> Path:
    return folder / "drafts" / f"{workload}-{size}"
