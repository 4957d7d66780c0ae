"""Judging a challenger: acceptance replay of both drafts on the same stored samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.capture.record import Sample
from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.control.costs import usable_costs
from tide_platform.control.dataset import read_window
from tide_platform.control.promotion import Comparison, Interval, Measured, Predicted, Verdict, decide
from tide_platform.control.records import WindowRecord
from tide_platform.evaluation.acceptance import RequestReplay
from tide_platform.evaluation.cost_model import CostModel, NotMeasured, speeds_of
from tide_platform.evaluation.throughput import Throughput, predict

CURVE_K = 5  # replay goes at least so far, to show what other numbers of speculative steps would bring


class NoSpeculation(TideError):
    """The deployment serves without a draft."""

    def __init__(self) -> None:
        super().__init__(
            "serving.k is 0: there is no acceptance to judge; set it to the number of steps served"
        )


@dataclass(frozen=True)
class Stored:
    """Samples to replay on, whole, and how many were left out because they hold too little for it."""

    samples: list[Sample]
    left_out: int


@dataclass(frozen=True)
class Replayed:
    """Both drafts on the samples of one set that can be replayed."""

    champion: list[RequestReplay]
    challenger: list[RequestReplay]
    left_out: int


def judge(
    settings: Settings,
    record: WindowRecord,
    champion: Path,
    challenger: Path,
    *,
    steps: Mapping[int, int],
    earlier: int = 0,
) -> Verdict:
    """The verdict on the draft in ``challenger`` against the one in ``champion``, on the window's validation
    samples and on the reference samples kept for judging, at ``serving.k``; with ``serving.adaptive``, at
    each draft's fastest k. ``steps``: decode steps by batch size, of the traffic that it is judged for.
    ``earlier``: verdicts that there are on this challenger already, against whatever champion.

    Raises :class:`NoSpeculation`, and what the store, the replay and the cost model raise.
    """
    import torch

    from tide_platform.draft.checkpoint import load_target_parts
    from tide_platform.serving.target import resolve_target

    if settings.serving.k == 0:
        raise NoSpeculation
    torch.set_num_threads(settings.training.threads)
    data = read_window(settings, record)
    target = load_target_parts(resolve_target(settings))
    drafts = (champion, challenger)
    # samples that may have computed the prefix that a judged one found cached
    donors = data.division.reference_train + data.division.train
    window = _replay(settings, data.version, data.division.validation, donors, drafts, target)
    k, margin, confidence = settings.serving.k, settings.gate.min_gain, settings.gate.confidence
    on_window = _compare(k, window, margin, confidence)
    reference = _replay(settings, data.version, data.division.reference_judge, donors, drafts, target)
    on_reference = _compare(k, reference, margin, confidence)
    model, costs = usable_costs(settings)
    predicted = _predict(model, on_window)
    throughput, no_throughput = _throughput(settings, window, steps, model, costs)
    return decide(
        window=str(record.key),
        champion=draft_digest(champion),
        challenger=draft_digest(challenger),
        k=settings.serving.k,
        on_window=on_window,
        on_reference=on_reference,
        confidence=settings.gate.confidence,
        min_gain=settings.gate.min_gain,
        reference_floor=settings.gate.reference_floor,
        slice_floor=settings.gate.slice_floor,
        slice_requests=settings.gate.slice_requests,
        earlier=earlier,
        predicted=predicted,
        costs=costs,
        throughput=throughput,
        no_throughput=no_throughput,
    )


def compare_drafts(
    settings: Settings,
    version: int,
    sample_ids: list[str],
    drafts: tuple[Path, Path],
    *,
    margin: float,
    confidence: float,
) -> Comparison:
    """Replay of both drafts (champion, challenger) on these samples at ``version`` of the dataset, paired.
    ``margin`` of the gain, by which the evidence is weighed. Raises what the store and the replay raise.
    """
    import torch

    from tide_platform.draft.checkpoint import load_target_parts
    from tide_platform.serving.target import resolve_target

    torch.set_num_threads(settings.training.threads)
    target = load_target_parts(resolve_target(settings))
    # each may have computed the prefix that another found cached
    both = _replay(settings, version, sample_ids, sample_ids, drafts, target)
    return _compare(settings.serving.k, both, margin, confidence)


def stored(settings: Settings, version: int, sample_ids: list[str], donor_ids: list[str]) -> Stored:
    """The samples at ``version`` of the dataset; ``donor_ids``: samples that may have computed the prefix
    that one of them found cached. Raises what the store raises.
    """
    from tide_platform.draft.prefix import fill_prefixes
    from tide_platform.evaluation.replay import not_replayable
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    samples = list(store.load(sample_ids, version=version))
    if any(len(s.tensors["row_pos"]) and s.tensors["row_pos"][0] > s.meta.start_pos for s in samples):
        # the server's drafts attended to the cached prefix too; replay without it reads too low
        samples = fill_prefixes(samples, donors=store.load(donor_ids, version=version))
    able = [sample for sample in samples if not_replayable(sample) is None]
    return Stored(able, len(samples) - len(able))


def replayed(settings: Settings, folder: Path, target: Any, samples: list[Sample]) -> list[RequestReplay]:
    """Replays of the draft in ``folder``, at every k up to ``serving.k``, or :data:`CURVE_K`."""
    import torch

    from tide_platform.draft.checkpoint import load_draft
    from tide_platform.evaluation.replay import replay

    dtype = getattr(torch, settings.serving.dtype)
    return replay(load_draft(folder), target, samples, max(settings.serving.k, CURVE_K), dtype=dtype)


def measured(replays: list[RequestReplay], k: int) -> Measured:
    """Acceptance at the served ``k``, and at every other."""
    from tide_platform.evaluation.acceptance import acceptance_by_position, acceptance_length

    ks = range(1, max(k, CURVE_K) + 1)
    return Measured(
        acceptance_length=acceptance_length(replays, k),
        by_k=[acceptance_length(replays, each) for each in ks],
        by_position=acceptance_by_position(replays, k),
    )


def _predict(model: CostModel | None, on_window: Comparison) -> list[Predicted]:
    """What the acceptance is worth on this machine, by batch size; without coefficients of this target and
    precision nothing is predicted.
    """
    if model is None:
        return []
    lengths = on_window.champion.by_k, on_window.challenger.by_k
    return [
        Predicted(batch, *(speeds_of(of_draft, of_batch) for of_draft in lengths))
        for batch, of_batch in sorted(model.by_batch.items())
    ]


def _throughput(
    settings: Settings, on_window: Replayed, steps: Mapping[int, int], model: CostModel | None, costs: str
) -> tuple[Throughput | None, str]:
    """Predicted tokens a second of both drafts under ``steps``; None where it cannot be known, and why.
    ``costs``: where ``model`` is from, or why there is none.
    """
    if model is None:
        return None, costs
    if not any(steps.values()):
        hours = settings.gate.histogram_hours
        return None, f"not known: no decode step was seen in {hours:g} h (gate.histogram_hours)"
    try:
        found = predict(
            on_window.champion,
            on_window.challenger,
            model,
            steps,
            k=settings.serving.k,
            adaptive=settings.serving.adaptive,
            confidence=settings.gate.confidence,
        )
    except NotMeasured as error:
        return None, f"not known: {error}; `tide bench cost-model` measures"
    return found, ""


def _replay(
    settings: Settings,
    version: int,
    sample_ids: list[str],
    donor_ids: list[str],
    drafts: tuple[Path, Path],
    target: Any,
) -> Replayed:
    found = stored(settings, version, sample_ids, donor_ids)
    of_champion, of_challenger = (replayed(settings, folder, target, found.samples) for folder in drafts)
    return Replayed(of_champion, of_challenger, found.left_out)


def _compare(k: int, both: Replayed, margin: float, confidence: float) -> Comparison:
    from tide_platform.evaluation.slices import by_slice
    from tide_platform.evaluation.statistics import compare

    of_champion, of_challenger = both.champion, both.challenger
    compared = compare(of_champion, of_challenger, k, confidence, margin=margin)
    return Comparison(
        requests=compared.requests,
        champion=measured(of_champion, k),
        challenger=measured(of_challenger, k),
        gain=Interval(compared.ratio - 1, compared.lower - 1, compared.upper - 1),
        evidence=compared.evidence,
        slices=by_slice(of_champion, of_challenger, k),
        left_out=both.left_out,
        slack=max((each.slack for each in of_champion), default=0.0),
    )
