"""``tide train``: a job's run from the dataset to a draft on disk, taken up again wherever it was."""

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tide_platform.config import TideError, draft_digest, target_digest
from tide_platform.config.locks import locked
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import WEIGHTS, load_draft, load_target_parts, save_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.vocab import inverse_map, map_digest
from tide_platform.store.hidden_states import HiddenStates, open_store
from tide_platform.training import provenance
from tide_platform.training.checkpoints import remove_checkpoints
from tide_platform.training.failures import forget_failures, noting_failures
from tide_platform.training.job import DRAFT, MOST_NAMED, RESULT, RUN_FOLDER, TrainJob, TrainResult
from tide_platform.training.led import Led
from tide_platform.training.loader import Loader
from tide_platform.training.plan import count
from tide_platform.training.planned import Planned, plan_job
from tide_platform.training.progress import JournalDamaged, StepRecord
from tide_platform.training.ranks import joined
from tide_platform.training.recovery import Recovery, ReplayDiverged, ResumeRefused
from tide_platform.training.samples import StoredSamples
from tide_platform.training.teacher import Heads, MissingTeacher
from tide_platform.training.trainer import fit
from tide_platform.training.world import PeerFailed, World, together

log = logging.getLogger("tide.train")

# a volume's server takes a lock from a node that died only after its lease: 90 s with NFS 4
_LOCK, _LOCK_WAIT_S = ".lock", 120.0
_BEGIN_ANEW = (ResumeRefused, ReplayDiverged, JournalDamaged)


class ProcessesDiffer(TideError):
    """A process of this run sees another job than the first one."""

    def __init__(self, rank: int, differing: list[str]):
        super().__init__(
            f"process {rank} of this run differs from the first in {', '.join(differing)}: all must see the "
            "same job file, drafts, target and dataset, and run the same release"
        )
        self.rank, self.differing = rank, differing


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

    Of several processes (``torchrun``) all call this with the same job; the first keeps ``out`` and is the
    one that calls ``on_past`` and ``on_step``.

    ``on_past`` gets the steps that earlier processes acknowledged, ``on_step`` each new one. ``stop`` true
    ends the run after the step in hand, saved. Raises the named errors of :mod:`tide_platform.draft.errors`,
    of the store, of :mod:`tide_platform.training.recovery`, of :mod:`tide_platform.training.ranks`,
    :class:`~tide_platform.config.locks.LockHeld` where another process trains there, and those of
    :func:`~tide_platform.training.trainer.fit`.
    """
    with joined(job.settings.training) as world, ExitStack() as held, noting_failures(job.out, world):
        together(world, lambda: check_draft(job.parent, job.target))

        def begin() -> None:
            job.out.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(job.out / _LOCK, _LOCK_WAIT_S))
            forget_failures(job.out)
            if fresh:
                _forget(job.out)

        world.led(begin)
        if world.size > job.settings.training.batch_size and world.rank == 0:
            log.warning(
                "training.batch_size %d is of all %d processes: some have nothing to do",
                job.settings.training.batch_size, world.size,
            )  # fmt: skip
        try:
            return _run(job, on_step, on_past, stop, world)
        except (*_BEGIN_ANEW, PeerFailed) as error:
            kind = error.kind if isinstance(error, PeerFailed) else type(error).__name__
            if not job.restart or kind not in {each.__name__ for each in _BEGIN_ANEW}:
                raise
            log.warning("begun anew: %s", error)
        # not within the handler: the error holds on to all that the first try had in memory
        world.led(lambda: _forget(job.out))
        return _run(job, on_step, on_past, stop, world)


@dataclass(frozen=True)
class _Run:
    """A planned job and the draft that it trains in place."""

    job: TrainJob
    planned: Planned
    draft: Eagle3Draft
    contract: dict[str, Any]
    world: World

    @property
    def key(self) -> str:
        return provenance.ids_digest(f"{name}={value}" for name, value in sorted(self.contract.items()))

    def finished(self) -> TrainResult | None:
        """The result of this very run, where its draft is whole."""
        found, folder = TrainResult.read(self.job.out / RESULT), self.job.out / DRAFT
        if found is None or found.contract != self.key or not (folder / WEIGHTS).is_file():
            return None
        return found if draft_digest(folder) == found.digest else None

    def machine(self) -> dict[str, Any]:
        world = self.world
        return provenance.machine(self.job.settings.training, world.device.type, world.size)

    def recovery(self) -> Recovery:
        settings = self.job.settings.training
        noted = self.machine() | provenance.code_version()
        return Recovery(self.job.out / RUN_FOLDER, self.contract, noted, settings.checkpoint_seconds)

    def load(self, store: HiddenStates) -> tuple[torch.Tensor, Heads, Loader]:
        """The target's embeddings, what the teacher needs of the target, and the samples. The rest of the
        target is not kept.
        """
        target = load_target_parts(self.job.target)
        heads = Heads.of(self.job.settings.training.teacher, target, self.draft)
        samples = StoredSamples(store, self.planned.refs, self.job.lance_version)
        inverse = inverse_map(self.draft.d2t.numpy(), self.draft.config.vocab_size)
        settings = self.job.settings.training
        loader = Loader(samples, self.planned.pool, inverse, settings, heads, self.world.size)
        return target.embed_VH, heads, loader

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
            "machine": self.machine(),
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
            processes=self.world.size,
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
    world: World,
) -> TrainResult:
    began = time.monotonic()
    run, store = together(world, lambda: _begin(job, world))
    _compare(run, world)
    done = world.led(lambda: None if (found := run.finished()) is None else found.to_json())
    if done is not None:
        result = TrainResult.from_json(done)
        world.led(lambda: _tell_past(on_past, [StepRecord(**record) for record in result.history]))
        return result
    with ExitStack() as opened:
        own: list[Recovery] = []
        world.led(lambda: own.append(opened.enter_context(closing(run.recovery()))))
        recovery = Led(world, own[0] if own else None)
        world.led(lambda: _tell_past(on_past, list(recovery.acknowledged)))
        embed_VH, heads, loader = together(world, lambda: run.load(store))
        load_seconds = time.monotonic() - began
        records = fit(
            run.draft, embed_VH, run.planned.plan, loader, job.settings.training, job.seed,
            on_step=on_step, recovery=recovery, skipped=loader.skipped, stop=stop, heads=heads,
            world=world, judge=loader.judge,
        )  # fmt: skip
        damaged = world.union(loader.skipped)
        finished = world.led(lambda: run.finish(own[0], records, damaged, load_seconds).to_json())
        return TrainResult.from_json(finished)


def _begin(job: TrainJob, world: World) -> tuple["_Run", HiddenStates]:
    """All that is known before a tensor is read."""
    store = open_store(job.settings)
    planned = plan_job(job, store)
    if job.settings.training.teacher not in ("topk", store.stream_meta().target_signal):
        raise MissingTeacher(store.uri, "the dataset holds no last hidden states")
    draft = load_draft(job.parent)
    return _Run(job, planned, draft, _contract(job, draft, planned), world), store


def _tell_past(on_past: Callable[[list[StepRecord]], None] | None, records: list[StepRecord]) -> None:
    if on_past and records:
        on_past(records)


def _compare(run: _Run, world: World) -> None:
    """All processes must have planned the same: they read the job, the dataset and the drafts each for
    itself. Raises :class:`ProcessesDiffer`.
    """
    own = run.contract | {"device": world.device.type}
    first = world.led(lambda: own)
    differing = [name for name, value in own.items() if first.get(name) != value]
    world.agree(ProcessesDiffer(world.rank, differing) if differing else None)


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
        "steps": len(planned.plan.steps),
        "plan": planned.plan.digest,
        **{f"training.{name}": value for name, value in settings.items()},
    }


def _forget(out: Path) -> None:
    shutil.rmtree(out / RUN_FOLDER, ignore_errors=True)
    (out / RESULT).unlink(missing_ok=True)
