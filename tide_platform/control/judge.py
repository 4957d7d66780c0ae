"""Judging a challenger: acceptance replay of both drafts on the same stored samples."""

from pathlib import Path
from typing import Any

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.control.dataset import read_window
from tide_platform.control.promotion import Comparison, Interval, Measured, Predicted, Verdict, decide
from tide_platform.control.records import WindowRecord
from tide_platform.evaluation.cost_model import FILE, CostModel, speeds_of

CURVE_K = 5  # replay goes at least so far, to show what other numbers of speculative steps would bring


class NoSpeculation(TideError):
    """The deployment serves without a draft."""

    def __init__(self) -> None:
        super().__init__(
            "serving.k is 0: there is no acceptance to judge; set it to the number of steps served"
        )


def judge(
    settings: Settings, record: WindowRecord, champion: Path, challenger: Path, earlier: int = 0
) -> Verdict:
    """The verdict on the draft in ``challenger`` against the one in ``champion``, on the window's validation
    samples and on the reference samples kept for judging, at ``serving.k``. ``earlier``: verdicts that there
    are on this challenger already, against whatever champion.

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
    on_window = _compare(settings, data.version, data.division.validation, donors, drafts, target)
    on_reference = _compare(settings, data.version, data.division.reference_judge, donors, drafts, target)
    predicted, costs = _predict(settings, on_window)
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
        earlier=earlier,
        predicted=predicted,
        costs=costs,
    )


def _predict(settings: Settings, on_window: Comparison) -> tuple[list[Predicted], str]:
    """What the acceptance is worth on this machine, by batch size, and where that is from; without
    coefficients of this target and precision nothing is predicted.
    """
    from tide_platform.config import target_digest
    from tide_platform.serving.target import resolve_target

    path = settings.state / FILE
    model = CostModel.read(path)
    if model is None:
        return [], "not known: no cost model was measured; `tide bench cost-model` does"
    of = model.conditions
    if model.target_digest != target_digest(resolve_target(settings)):
        return (
            [],
            f"not known: {path} was measured with another target; `tide bench cost-model` measures again",
        )
    if of.get("dtype") != settings.serving.dtype or of.get("device") != settings.serving.device:
        return [], (
            f"not known: {path} was measured on {of.get('device')} in {of.get('dtype')}, served is "
            f"{settings.serving.device} in {settings.serving.dtype}; `tide bench cost-model` measures again"
        )
    lengths = on_window.champion.by_k, on_window.challenger.by_k
    predicted = [
        Predicted(batch, *(speeds_of(of_draft, costs) for of_draft in lengths))
        for batch, costs in sorted(model.by_batch.items())
    ]
    return predicted, f"costs measured {of.get('date')} on {of.get('cores')} cores, {of.get('dtype')}"


def _compare(
    settings: Settings,
    version: int,
    sample_ids: list[str],
    donor_ids: list[str],
    drafts: tuple[Path, Path],
    target: Any,
) -> Comparison:
    import torch

    from tide_platform.draft.checkpoint import load_draft
    from tide_platform.draft.prefix import fill_prefixes
    from tide_platform.evaluation.replay import not_replayable, replay
    from tide_platform.evaluation.slices import by_slice
    from tide_platform.evaluation.statistics import compare
    from tide_platform.store.hidden_states import open_store

    k = settings.serving.k
    store = open_store(settings)
    samples = list(store.load(sample_ids, version=version))
    if any(len(s.tensors["row_pos"]) and s.tensors["row_pos"][0] > s.meta.start_pos for s in samples):
        # the server's drafts attended to the cached prefix too; replay without it reads too low
        samples = fill_prefixes(samples, donors=store.load(donor_ids, version=version))
    able = [sample for sample in samples if not_replayable(sample) is None]
    dtype = getattr(torch, settings.serving.dtype)
    of_champion, of_challenger = (
        replay(load_draft(folder), target, able, max(k, CURVE_K), dtype=dtype) for folder in drafts
    )
    compared = compare(of_champion, of_challenger, k, settings.gate.confidence, margin=settings.gate.min_gain)
    return Comparison(
        requests=compared.requests,
        champion=_measured(of_champion, k),
        challenger=_measured(of_challenger, k),
        gain=Interval(compared.ratio - 1, compared.lower - 1, compared.upper - 1),
        evidence=compared.evidence,
        slices=by_slice(of_champion, of_challenger, k),
        left_out=len(samples) - len(able),
        slack=max((each.slack for each in of_champion), default=0.0),
    )


def _measured(replays: list[Any], k: int) -> Measured:
    from tide_platform.evaluation.acceptance import acceptance_by_position, acceptance_length

    ks = range(1, max(k, CURVE_K) + 1)
    return Measured(
        acceptance_length=acceptance_length(replays, k),
        by_k=[acceptance_length(replays, each) for each in ks],
        by_position=acceptance_by_position(replays, k),
    )
