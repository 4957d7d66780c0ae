"""Our trainer against ``speculators``, and training from the store against other sources of hidden states.

Both sides fine-tune one base draft on the same samples, in the same batches and at the same learning rates,
each run in a process of its own, the two in turn. Every run leaves a file: an interrupted benchmark goes on
where it was. What is compared, and how each side counts, is said in docs/benchmarks.md.
"""

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tide_platform.bench import train_peer as peer
from tide_platform.bench.counts import compare_counts
from tide_platform.bench.report import Report, alternation, paired_interval, paired_ratio
from tide_platform.bench.train_judge import Counts, acceptance_length, judge
from tide_platform.bench.train_samples import HELD_OUT, WORKLOAD, collect, features, stored, top_k
from tide_platform.capture.record import Sample
from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.config.files import write_json

STORE_PAIRS = 4
PACKS = (1, 2, 4)  # samples in a pack of the peer, probed beside a whole batch
OURS, THEIRS = "ours", "theirs"


class WorkerFailed(TideError):
    """A training process of the benchmark ended with an error."""

    def __init__(self, log: Path, status: int):
        super().__init__(f"a run of the benchmark ended with status {status}; its log: {log}")
        self.log, self.status = log, status


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    samples: int  # of a run
    held_out: int
    seeds: Sequence[int]  # one run of each side for each
    store_pairs: int  # runs from the store, and from memory

    @property
    def counts(self) -> dict[str, int]:
        """Samples by tenant."""
        return {WORKLOAD: self.samples, HELD_OUT: self.held_out}


@dataclass(frozen=True)
class Run:
    """One process: what it is, and where its result is kept."""

    kind: str  # ours | theirs | memory | store | recompute_once | recompute_each_epoch
    number: int  # its seed; of the store's runs, which repetition

    def folder(self, root: Path) -> Path:
        return root / "runs" / f"{self.kind}-{self.number}"

    def result(self, root: Path) -> dict[str, Any] | None:
        path = self.folder(root) / "result.json"
        return json.loads(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class Work:
    """What every run is given."""

    settings: Settings
    captured: Path  # folder of the samples
    root: Path  # folder of what one recipe makes of them
    held_out: list[Sample]
    target: Path
    draft: Path
    lance_version: int
    sample_ids: list[str]
    peer: dict[str, Any]  # the peer's spec, but for the run's own


def run(
    settings: Settings, folder: Path, sizes: Sizes, *, most: int | None = None, say: Callable[[str], None]
) -> Report:
    """Captures into ``folder`` what is not there, proves the conversion, does at most ``most`` of the runs
    that are left, and reports on those that are done.

    ``ratios``: see :func:`summarize`. Raises :class:`~tide_platform.bench.bytes.NotCaptured`, the errors of
    :mod:`~tide_platform.bench.train_peer`, :class:`WorkerFailed`.
    """
    work = _prepare(settings, folder.absolute(), sizes, say)
    runs = plan(sizes.seeds, sizes.store_pairs)
    for each in [one for one in runs if one.result(work.root) is None][:most]:
        result = _do(each, work)
        say(f"{each.kind} {each.number}: {_said(result)}")
    done = {one: result for one in runs if (result := one.result(work.root)) is not None}
    judged = _judged(work, [one for one in done if one.kind in (OURS, THEIRS)], most is None, say)
    conversion = json.loads((work.root / "conversion.json").read_text())
    report = summarize(done, judged, conversion)
    report.raw |= {"recipe": settings.training.model_dump(), "samples": sizes.counts}
    return report


def plan(seeds: Sequence[int], store_pairs: int) -> list[Run]:
    """All runs, in the order in which they are done: case and yardstick in turn, ABBA."""
    order = alternation(len(seeds))
    runs = [Run(OURS if ours else THEIRS, seeds[i // 2]) for i, ours in enumerate(order)]
    order = alternation(store_pairs)
    runs += [Run("store" if store else "memory", i // 2) for i, store in enumerate(order)]
    return [*runs, Run("recompute_once", 0), Run("recompute_each_epoch", 0)]


def summarize(
    done: dict[Run, dict[str, Any]], judged: dict[str, dict[str, Counts]], conversion: dict[str, Any]
) -> Report:
    """``ratios``: ``tokens_per_s``, supervised tokens a second, ours over theirs, in the same batches;
    ``tokens_per_cpu_s``, a second of the process's CPU time, which neighbours change less;
    ``tokens_per_s_best_pack``, over theirs at the pack size that suits it best; ``acceptance_replay`` and
    ``acceptance_live``, held-out acceptance length, ours over theirs, sums over the seeds, intervals over
    requests; ``store_over_memory``, seconds of a whole run; ``recompute_once``, ``recompute_each_epoch``,
    seconds of a run that makes its hidden states with the target, over one from the store.
    """
    report = Report("train", {}, raw={"conversion": conversion, "judged": judged})
    report.raw["acceptance_length"] = {
        name: {how: acceptance_length(counts) for how, counts in of.items()} for name, of in judged.items()
    }
    report.raw["runs"] = {f"{one.kind}-{one.number}": result for one, result in done.items()}
    both = [one.number for one in done if one.kind == OURS and Run(THEIRS, one.number) in done]
    if both:
        speeds = {who: [rate(done[Run(who, seed)]) for seed in both] for who in (OURS, THEIRS)}
        report.ratios["tokens_per_s"] = paired_ratio(speeds[OURS], speeds[THEIRS])
        if len(both) > 1:
            report.intervals["tokens_per_s"] = paired_interval(speeds[OURS], speeds[THEIRS])
        by_cpu = {who: [rate(done[Run(who, seed)], "cpu_seconds") for seed in both] for who in (OURS, THEIRS)}
        report.ratios["tokens_per_cpu_s"] = paired_ratio(by_cpu[OURS], by_cpu[THEIRS])
        best = max(conversion["probes"], key=lambda one: one["supervised"][0] / one["seconds"])
        best_rate = best["supervised"][0] / best["seconds"]
        report.ratios["tokens_per_s_best_pack"] = statistics.median(speeds[OURS]) / best_rate
        report.raw["tokens_per_cpu_s"] = by_cpu
        report.raw["tokens_per_s"] = speeds | {"theirs_best_pack": best | {"tokens_per_s": best_rate}}
    for how in ("replay", "live"):
        pairs = [[judged.get(f"{who}-{seed}", {}).get(how) for who in (THEIRS, OURS)] for seed in both]
        whole = [(base, these) for base, these in pairs if base and these]
        if whole:
            case = f"acceptance_{how}"
            report.ratios[case], report.intervals[case] = compare_counts(
                [base for base, _ in whole], [these for _, these in whole]
            )
    _sources(report, done)
    return report


def _sources(report: Report, done: dict[Run, dict[str, Any]]) -> None:
    """The ratios of whole runs by where their hidden states come from."""
    whole = {
        kind: [r["whole_s"] for one, r in done.items() if one.kind == kind] for kind in ("store", "memory")
    }
    pairs = min(map(len, whole.values()))
    if pairs:
        store, memory = whole["store"][:pairs], whole["memory"][:pairs]
        report.ratios["store_over_memory"] = paired_ratio(store, memory)
        if pairs > 1:
            report.intervals["store_over_memory"] = paired_interval(store, memory)
        for kind in ("recompute_once", "recompute_each_epoch"):
            if Run(kind, 0) in done:
                report.ratios[kind] = done[Run(kind, 0)]["whole_s"] / statistics.median(store)


def rate(result: dict[str, Any], of: str = "seconds") -> float:
    """Supervised tokens a second of a run, without its first step (which warms up)."""
    tokens = [one[0] if isinstance(one, list) else one for one in result["supervised"]]
    return sum(tokens[1:]) / sum(result[of][1:])


def _said(result: dict[str, Any]) -> str:
    if "whole_s" in result:
        return f"{result['whole_s']:.0f} s"
    return f"{rate(result):.0f} supervised tokens a second, {sum(result['seconds']):.0f} s"


def _prepare(settings: Settings, folder: Path, sizes: Sizes, say: Callable[[str], None]) -> Work:
    """Samples, dataset, the peer's files, and the proof that both sides hold the same draft."""
    from tide_platform.draft.checkpoint import load_draft, load_target_parts
    from tide_platform.draft.vocab import inverse_map
    from tide_platform.serving.drafts import resolve_draft
    from tide_platform.serving.target import resolve_target
    from tide_platform.training.data import prepare_all

    captured, training = folder / "captured", settings.training
    stream, found = collect(settings, captured, sizes.counts, say)
    samples = found[WORKLOAD]
    version = stored(settings, captured, stream, samples)
    base, target_folder = resolve_draft(settings), resolve_target(settings)
    draft, target = load_draft(base), load_target_parts(target_folder)
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    plain = [top_k(sample) for sample in samples]
    examples, skipped = prepare_all(plain, inverse, training.unroll_steps, training.max_length)
    by_id = {sample.meta.sample_id: sample for sample in samples}
    used = [by_id[example.sample_id] for example in examples]
    if skipped:
        say(f"left out on both sides: {skipped}")
    root = folder / f"recipe-{_signature(settings, sizes.counts, draft_digest(base))}"
    spec, specs = _peer_specs(settings, root, draft, target, used, examples, sizes.seeds)
    proof = root / "conversion.json"
    if not proof.exists():
        found_out = _prove(root, spec | specs[sizes.seeds[0]], draft, target)
        write_json(proof, found_out)
        say(f"one draft on both sides: logits and loss differ by {found_out['differences']}")
    ids = [sample.meta.sample_id for sample in used]
    given = {"common": spec, "seeds": specs}
    return Work(settings, captured, root, found[HELD_OUT], target_folder, base, version, ids, given)


def _peer_specs(
    settings: Settings,
    root: Path,
    draft: Any,
    target: Any,
    samples: Sequence[Sample],
    examples: Sequence[Any],
    seeds: Sequence[int],
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """What the peer is told in every run, and by seed; its weights and features are written."""
    from safetensors.torch import save_file

    training, files = settings.training, root / "peer"
    files.mkdir(parents=True, exist_ok=True)
    save_file(features(samples, training.max_length), files / "features.safetensors")
    save_file(peer.weights(draft, target), files / "weights.safetensors")
    common = {
        "draft": peer.shape(draft),
        "weights": str(files / "weights.safetensors"),
        "features": str(files / "features.safetensors"),
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "unroll_steps": training.unroll_steps,
        "decay": peer.DECAY,
        "autocast": training.autocast,
        "threads": training.threads,
        "pack_sizes": sorted({*PACKS, training.batch_size}),
        "save": True,
    }
    recipes = {seed: peer.recipe(examples, settings, seed) for seed in seeds}
    return common, {seed: asdict(recipe) | {"seed": seed} for seed, recipe in recipes.items()}


def _prove(root: Path, spec: dict[str, Any], draft: Any, target: Any) -> dict[str, Any]:
    """The differences between the two sides on one batch, and how fast the peer is in each form."""
    from safetensors.torch import load_file

    out, first = root / "conversion", spec | {"attention": "eager"}
    peer.call("logits", first | {"autocast": False}, out)
    batch = load_file(spec["features"])
    differences = peer.check_conversion(draft, target, batch, spec["steps"][0], out)
    return {"differences": differences, "probes": peer.call("probe", first, root / "probe")["probes"]}


def _signature(settings: Settings, counts: dict[str, int], draft: str) -> str:
    """Of all that a run's result depends on: results of another recipe are no results of this one."""
    own = {"training": settings.training.model_dump(), "aux_format": settings.capture.aux_format}
    own |= {"dtype": settings.serving.dtype, "counts": counts, "draft": draft}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:10]


def _do(one: Run, work: Work) -> dict[str, Any]:
    out = one.folder(work.root)
    shutil.rmtree(out, ignore_errors=True)
    if one.kind == THEIRS:
        probes = json.loads((work.root / "conversion.json").read_text())["probes"]
        same = [probe for probe in probes if probe["samples"] == work.settings.training.batch_size]
        attention = min(same, key=lambda probe: probe["seconds"])["attention"]
        spec = work.peer["common"] | work.peer["seeds"][one.number] | {"attention": attention}
        return peer.call("train", spec, out)
    epochs = work.settings.training.epochs
    kind, times = {
        "recompute_once": ("recompute", 1),
        "recompute_each_epoch": ("recompute", epochs),
    }.get(one.kind, (one.kind, 0))
    spec = {
        "kind": kind,
        "times": times,
        "settings": work.settings.model_dump(mode="json"),
        "folder": str(work.captured),
        "target": str(work.target),
        "draft": str(work.draft),
        "seed": one.number,
        "lance_version": work.lance_version,
        "sample_ids": work.sample_ids,
        "out": str(out),
    }
    out.mkdir(parents=True)
    (out / "spec.json").write_text(json.dumps(spec))
    log = out / "worker.log"
    argv = [sys.executable, "-m", "tide_platform.bench.train_worker", str(out / "spec.json")]
    env = os.environ | {"OMP_NUM_THREADS": str(work.settings.training.threads)}
    with log.open("w") as file:
        done = subprocess.run(argv, stdout=file, stderr=file, env=env, check=False)
    if done.returncode:
        raise WorkerFailed(log, done.returncode)
    result = one.result(work.root)
    assert result is not None
    return result


def _judged(
    work: Work, runs: Sequence[Run], live: bool, say: Callable[[str], None]
) -> dict[str, dict[str, Counts]]:
    """The base draft and those of the runs; the peer's come in as a user's would (``tide draft import``)."""
    from tide_platform.draft.importer import import_draft

    drafts = {"base": work.draft}
    for one in runs:
        folder = one.folder(work.root)
        drafts[f"{one.kind}-{one.number}"] = folder / ("imported" if one.kind == THEIRS else "draft")
        if one.kind == THEIRS and not (folder / "imported").exists():
            import_draft(folder / "draft", work.target, folder / "imported")
    return judge(work.settings, work.root, drafts, work.target, work.held_out, live, say)
