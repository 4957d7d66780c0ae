"""A job's samples and every step of all its epochs, from their metadata alone."""

import logging
from dataclasses import dataclass

from tide_platform.store.errors import SamplesMissing
from tide_platform.store.feature_store import SampleRef
from tide_platform.store.hidden_states import HiddenStates
from tide_platform.training.data import NothingToTrain
from tide_platform.training.draw import drawn
from tide_platform.training.job import TrainJob
from tide_platform.training.plan import Expected, Plan, count, expected, plan_run
from tide_platform.training.samples import find_refs

log = logging.getLogger("tide.train")


@dataclass(frozen=True)
class Planned:
    """A job's samples and their order: all that is known before a tensor is read."""

    refs: list[SampleRef]  # of all samples named that are there; donors of prefixes among them
    pool: list[int]  # those that are trained on, indices into refs
    plan: Plan
    skipped: dict[str, str]  # sample id -> why it cannot teach anything
    expired: dict[str, int]
    parts: dict[str, list[SampleRef]]  # "window", "reference", "past" -> those of the pool


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
