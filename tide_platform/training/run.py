"""``tide train``: a job's run from the dataset to a draft on disk, taken up again wherever it was."""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import draft_digest, target_digest
from tide_platform.config.locks import locked
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import WEIGHTS, load_draft, load_target_parts, save_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.vocab import inverse_map, map_digest
from tide_platform.store.errors import SamplesMissing
from tide_platform.store.feature_store import SampleRef
from tide_platform.store.hidden_states import HiddenStates, open_store
from tide_platform.training import provenance
from tide_platform.training.checkpoints import remove_checkpoints
from tide_platform.training.data import NothingToTrain
from tide_platform.training.draw import drawn
from tide_platform.training.job import DRAFT, MOST_NAMED, RESULT, RUN_FOLDER, TrainJob, TrainResult
from tide_platform.training.loader import Loader
from tide_platform.training.plan import Expected, Plan, count, expected, plan_run
from tide_platform.training.progress import JournalDamaged, StepRecord
from tide_platform.training.recovery import Recovery, ReplayDiverged, ResumeRefused
from tide_platform.training.samples import StoredSamples, find_refs
from tide_platform.training.teacher import Heads, MissingTeacher
from tide_platform.training.trainer import fit

log = logging.getLogger("tide.train")

_LOCK, _LOCK_WAIT_S = ".lock", 30.0
_DEVICE = "cpu"


@dataclass(frozen=True)
class Planned:
    """A job's samples and their order: all that is known before a tensor is read."""

    refs: list[SampleRef]  # of all samples named that are there; donors of prefixes among them
    pool: list[int]  # those that are trained on, indices into refs
    plan: Plan
    skipped: dict[str, str]  # sample id -> why it cannot teach anything
    expired: dict[str, int]
    parts: dict[str, list[SampleRef]]  # "window", "reference", "past" -> those of the pool


def run_job(
    job: TrainJob,
    on_step: Callable[[StepRecord], None] | None = None,
    *,
    on_past: Callable[[list[StepRecord]], None] | None = None,
    fresh: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Fine-tunes the parent on the job's samples; writes ``out/draft`` (atomically), then
    ``out/result.json``. The run is kept in ``out/run`` meanwhile and goes on from there; ``fresh`` begins it
    anew. A finished one is not trained again.

    ``on_past`` gets the steps that earlier processes acknowledged, ``on_step`` each new one. ``stop`` true
    ends the run after the step in hand, saved. Raises the named errors of :mod:`tide_platform.draft.errors`,
    of the store, of :mod:`tide_platform.training.recovery`,
    :class:`~tide_platform.config.locks.LockHeld` where another process trains there, and those of
    :func:`~tide_platform.training.trainer.fit`.
    """
    check_draft(job.parent, job.target)
    job.out.mkdir(parents=True, exist_ok=True)
    with locked(job.out / _LOCK, _LOCK_WAIT_S):
        if fresh:
            _forget(job.out)
        try:
            return _run(job, on_step, on_past, stop)
        except (ResumeRefused, ReplayDiverged, JournalDamaged) as error:
            if not job.restart:
                raise
            log.warning("begun anew: %s", error)
            _forget(job.out)
            return _run(job, on_step, on_past, stop)


def plan_job(job: TrainJob, store: HiddenStates) -> Planned:
    """Reads the metadata of the job's samples and plans all epochs.

    Raises :class:`~tide_platform.store.errors.SamplesMissing` where the window's own are not there, and
    :class:`~tide_platform.training.data.NothingToTrain`.
    """
    settings = job.settings.training
    window = set(job.train_sample_ids)
    named = {"window": job.train_sample_ids, "reference": job.reference_sample_ids}
    named["past"] = [name for name in job.past_sample_ids if name not in window]
    found = find_refs(store, [name for ids in named.values() for name in ids], job.lance_version)
    if missing := [name for name in named["window"] if name not in found]:
        raise SamplesMissing(store.uri, missing)
    sizes: dict[str, Expected] = {}
    skipped: dict[str, str] = {}
    for name, ref in found.items():
        size = expected(ref, settings.unroll_steps, settings.max_length)
        if isinstance(size, str):
            skipped[name] = size
        else:
            sizes[name] = size
    usable = {part: [name for name in ids if name in sizes] for part, ids in named.items()}
    if not usable["window"]:
        raise NothingToTrain(count(skipped[name] for name in named["window"]))
    epochs = [_epoch(job, usable, epoch) for epoch in range(settings.epochs)]
    pool = list(dict.fromkeys(name for names in epochs for name in names))
    at = {name: i for i, name in enumerate(pool)}
    plan = plan_run(
        [sizes[name] for name in pool],
        [[at[name] for name in names] for names in epochs],
        settings.batch_size,
        job.seed,
    )
    refs = list(found.values())
    where = {ref.sample_id: i for i, ref in enumerate(refs)}
    parts = {part: [found[name] for name in ids if name in at] for part, ids in usable.items()}
    expired = {part: sum(name not in found for name in named[part]) for part in ("reference", "past")}
    if any(expired.values()):
        log.warning(
            "%d reference samples and %d of past windows are not in the dataset any more",
            *expired.values(),
        )
    return Planned(refs, [where[name] for name in pool], plan, skipped, expired, parts)


def _epoch(job: TrainJob, usable: dict[str, list[str]], epoch: int) -> list[str]:
    window, settings = usable["window"], job.settings.training
    ratios = {"reference": settings.reference_ratio, "past": settings.past_window_ratio}
    return window + [
        name
        for part, ratio in ratios.items()
        for name in drawn(usable[part], round(ratio * len(window)), epoch, job.seed, part)
    ]


@dataclass(frozen=True)
class _Run:
    """A planned job and the draft that it trains in place."""

    job: TrainJob
    planned: Planned
    draft: Eagle3Draft
    contract: dict[str, Any]

    @property
    def key(self) -> str:
        return provenance.ids_digest(f"{name}={value}" for name, value in sorted(self.contract.items()))

    def finished(self) -> TrainResult | None:
        """The result of this very run, where its draft is whole."""
        found, folder = TrainResult.read(self.job.out / RESULT), self.job.out / DRAFT
        if found is None or found.contract != self.key or not (folder / WEIGHTS).is_file():
            return None
        return found if draft_digest(folder) == found.digest else None

    def recovery(self) -> Recovery:
        settings = self.job.settings.training
        noted = provenance.machine(settings, _DEVICE) | provenance.code_version()
        return Recovery(self.job.out / RUN_FOLDER, self.contract, noted, settings.checkpoint_seconds)

    def loader(self, store: HiddenStates, heads: Heads) -> Loader:
        samples = StoredSamples(store, self.planned.refs, self.job.lance_version)
        inverse = inverse_map(self.draft.d2t.numpy(), self.draft.config.vocab_size)
        return Loader(samples, self.planned.pool, inverse, self.job.settings.training, heads)

    def finish(
        self, recovery: Recovery, records: list[StepRecord], damaged: dict[str, str], load_seconds: float
    ) -> TrainResult:
        """The draft, then the result; checkpoints have served then."""
        job, planned = self.job, self.planned
        skipped = planned.skipped | damaged
        named = dict(sorted(skipped.items())[:MOST_NAMED])
        samples = len(planned.pool) - len(damaged)
        told = {
            "made_by": "tide train",
            "parent": self.contract["parent"],
            "target_digest": self.contract["target"],
            "lance_version": job.lance_version,
            "samples": samples,
            "data": {part: provenance.samples_of(refs) for part, refs in planned.parts.items()},
            "expired": planned.expired,
            "skipped": count(skipped.values()),
            "skipped_samples": named,
            "tokens": records[-1].tokens,
            "steps": len(records),
            "plan": planned.plan.digest,
            "seed": job.seed,
            "training": job.settings.training.model_dump(),
            "machine": provenance.machine(job.settings.training, _DEVICE),
            "code": provenance.code_version(),
            **job.provenance,
        }
        digest = save_draft(job.out / DRAFT, self.draft, told)
        check_draft(job.out / DRAFT, job.target, parent_folder=job.parent)
        result = TrainResult(
            digest=digest,
            folder=job.out / DRAFT,
            parent_digest=self.contract["parent"],
            contract=self.key,
            steps=len(records),
            tokens=records[-1].tokens,
            seconds=records[-1].seconds,
            wait_seconds=sum(record.wait_seconds for record in records),
            load_seconds=load_seconds,
            samples=samples,
            skipped=count(skipped.values()),
            skipped_samples=named,
            expired=planned.expired,
            replayed=recovery.replayed,
            diverged=recovery.diverged,
            history=[record.to_json() for record in records],
        )
        result.write(job.out / RESULT)
        remove_checkpoints(job.out / RUN_FOLDER)
        return result


def _run(
    job: TrainJob,
    on_step: Callable[[StepRecord], None] | None,
    on_past: Callable[[list[StepRecord]], None] | None,
    stop: Callable[[], bool],
) -> TrainResult:
    began = time.monotonic()
    store = open_store(job.settings)
    planned = plan_job(job, store)
    if job.settings.training.teacher not in ("topk", store.stream_meta().target_signal):
        raise MissingTeacher(store.uri, "the dataset holds no last hidden states")
    draft = load_draft(job.parent)
    run = _Run(job, planned, draft, _contract(job, draft, planned))
    if (done := run.finished()) is not None:
        if on_past:
            on_past([StepRecord(**record) for record in done.history])
        return done
    with closing(run.recovery()) as recovery:
        if on_past and recovery.acknowledged:
            on_past(list(recovery.acknowledged))
        target = load_target_parts(job.target)
        heads = Heads.of(job.settings.training.teacher, target, draft)
        loader = run.loader(store, heads)
        load_seconds = time.monotonic() - began
        records = fit(
            draft, target.embed_VH, planned.plan, loader, job.settings.training, job.seed,
            on_step=on_step, recovery=recovery, skipped=loader.skipped, stop=stop, heads=heads,
            device=_DEVICE,
        )  # fmt: skip
        return run.finish(recovery, records, loader.skipped, load_seconds)


def _contract(job: TrainJob, draft: Eagle3Draft, planned: Planned) -> dict[str, Any]:
    """Everything that decides the result, flat, so that a difference has a name."""
    window, settings = job.train_sample_ids, provenance.decisive(job.settings.training)
    return {
        "tide-platform": provenance.package_version(),
        "parent": draft_digest(job.parent),
        "target": target_digest(job.target),
        "map": map_digest(draft.d2t.numpy()),
        "samples": provenance.ids_digest(sorted(window)),
        "order of samples": provenance.ids_digest(window),
        "reference samples": provenance.ids_digest(sorted(job.reference_sample_ids)),
        "past samples": provenance.ids_digest(sorted(job.past_sample_ids)),
        "seed": job.seed,
        "processes": 1,  # a step's samples are divided among them
        "steps": len(planned.plan.steps),
        "plan": planned.plan.digest,
        **{f"training.{name}": value for name, value in settings.items()},
    }


def _forget(out: Path) -> None:
    shutil.rmtree(out / RUN_FOLDER, ignore_errors=True)
    (out / RESULT).unlink(missing_ok=True)
