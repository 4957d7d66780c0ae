"""From the ledger to the report's figures. Asks no server: what it did not tell while it ran is not known."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.audit import Action, Entry
from tide_platform.control.costs import usable_costs
from tide_platform.control.history import MIXED, Block, batch_of, histogram
from tide_platform.control.ledger import Ledger
from tide_platform.control.overview import acceptance_at_promotion
from tide_platform.control.promotion import Verdict
from tide_platform.control.records import VerdictRecord, WindowRecord
from tide_platform.control.rollouts import Step
from tide_platform.control.states import WindowKey
from tide_platform.evaluation.cost_model import CostModel
from tide_platform.report.figures import (
    AuditRow,
    HeldRow,
    Mark,
    PredictedRow,
    Report,
    Served,
    VerdictFigures,
    WindowRow,
)
from tide_platform.report.live import bin_width, cell, cells
from tide_platform.report.savings import saved

WINDOWS, AUDITED = 20, 30  # newest so many


def gather(settings: Settings, ledger: Ledger, back_s: float, now: float | None = None) -> Report:
    """The figures of the last ``back_s`` seconds. Raises what :func:`usable_costs` does."""
    now = time.time() if now is None else now
    since, deployment = now - back_s, settings.deployment
    every = ledger.history.blocks(deployment)
    blocks = [b for b in every if b.ended_at > since]
    deployments, audit = ledger.deployments(deployment), ledger.audit(deployment)
    windows = ledger.windows(deployment)
    served = _served(ledger, deployment, deployments, audit, every)
    first = first_draft(deployments, every)
    bin_s = bin_width(blocks)
    model, costs = usable_costs(settings)
    verdicts = ledger.last_verdicts(deployment, 1)
    frozen = ledger.guard.frozen(deployment)
    drafts = [draft for draft in dict.fromkeys((first, served.digest if served else None)) if draft]
    return Report(
        deployment=deployment,
        made_at=now,
        since=since,
        served=served,
        live=cell(blocks) if blocks else None,
        missed=ledger.history.missed(deployment),
        mixed=sum(b.requests for b in blocks if b.draft == MIXED),
        bin_s=bin_s,
        acceptance=cells(blocks, bin_s=bin_s, draft=True),
        speed=cells(blocks, bin_s=bin_s, batch=True),
        volume=cells(blocks, bin_s=bin_s),
        by_concurrency=cells(blocks, batch=True, draft=True),
        steps=histogram(ledger.history.steps(deployment, since)),
        by_tenant=cells(blocks, tenant=True, draft=True),
        marks=[mark for mark in _marks(ledger, deployment, deployments, audit) if mark.at > since],
        verdict=_verdict(verdicts[-1]) if verdicts else None,
        windows=dict(sorted(Counter(record.state.value for record in windows).items())),
        last_windows=[_window(record) for record in windows[-WINDOWS:]],
        frozen=HeldRow(None, **vars(frozen)) if frozen else None,
        bars=[HeldRow(d, **vars(held)) for d, held in ledger.guard.barred_drafts(deployment).items()],
        audit=[_audited(entry) for entry in audit[-AUDITED:]],
        saved=saved(first, blocks, [b for b in every if b.draft == first], bin_s),
        predicted=_predicted(model, settings.serving.k, blocks, drafts),
        costs=costs,
    )


def first_draft(deployments: Sequence[dict[str, Any]], every: Sequence[Block]) -> str | None:
    """The draft that was served before any other; None where none but it was deployed.

    The one that the first deployment replaced; where a dead run left that unknown, the oldest live requests'.
    """
    if not deployments:
        return None
    if (previous := deployments[0]["previous"]) is not None:
        return previous
    return next((b.draft for b in every if b.draft not in (MIXED, deployments[0]["served"])), None)


def _served(
    ledger: Ledger,
    deployment: str,
    deployments: Sequence[dict[str, Any]],
    audit: Sequence[Entry],
    every: Sequence[Block],
) -> Served | None:
    if not deployments:
        draft = next((b.draft for b in reversed(every) if b.draft != MIXED), None)
        return Served(draft, None, None, None, None, None) if draft else None
    last = deployments[-1]
    entry = _entry_of(last, audit)
    of_window = (
        [
            Verdict.from_json(each.evidence)
            for each in ledger.verdicts_of(WindowKey(deployment, last["window"]))
        ]
        if last["window"]
        else []
    )
    return Served(
        digest=last["served"],
        since=last["deployed_at"],
        by=entry.actor if entry else None,
        reason=entry.reason if entry else None,
        window=last["window"],
        at_promotion=acceptance_at_promotion(last, of_window),
    )


def _marks(
    ledger: Ledger, deployment: str, deployments: Sequence[dict[str, Any]], audit: Sequence[Entry]
) -> list[Mark]:
    """Deployments, and rollouts that were undone, oldest first."""
    found = []
    for row in deployments:
        entry = _entry_of(row, audit)
        what = entry.action if entry else Action.DEPLOYED
        taken_back = what is Action.ROLLED_BACK and row["previous"]
        found.append(
            Mark(
                at=row["deployed_at"],
                what=what.value,
                digest=row["previous"] if taken_back else row["served"],
                serves=row["served"],
                window=row["window"],
                actor=entry.actor if entry else None,
                reason=entry.reason if entry else "",
            )
        )
    for rollout in ledger.rollouts.history(deployment):
        if rollout.step is Step.UNDONE:
            found.append(
                Mark(
                    at=rollout.updated_at,
                    what="undone",
                    digest=rollout.challenger,
                    serves=rollout.previous,
                    window=rollout.window,
                    actor=rollout.actor,
                    reason=rollout.evidence.get("undone", ""),
                )
            )
    return sorted(found, key=lambda mark: mark.at)


def _entry_of(row: dict[str, Any], audit: Sequence[Entry]) -> Entry | None:
    """The audit's row on a deployment: written in its transaction, with its time. None where an older version
    of the ledger wrote none.
    """
    same = (e for e in audit if e.digest == row["served"] and abs(e.at - row["deployed_at"]) < 1e-3)
    return next(same, None)


def _verdict(record: VerdictRecord) -> VerdictFigures:
    verdict = Verdict.from_json(record.evidence)
    on = verdict.on_window
    drafts = {"champion": on.champion, "challenger": on.challenger} if on else {}
    return VerdictFigures(
        window=verdict.window,
        at=record.judged_at,
        champion=verdict.champion,
        challenger=verdict.challenger,
        passed=verdict.passed,
        k=verdict.k,
        reasons=verdict.reasons,
        requests=on.requests if on else 0,
        acceptance_length={name: of.acceptance_length for name, of in drafts.items()},
        by_position={name: of.by_position for name, of in drafts.items()},
        slices=on.slices if on else [],
    )


def _window(record: WindowRecord) -> WindowRow:
    return WindowRow(
        window=record.key.window,
        state=record.state.value,
        samples=record.samples,
        tokens=record.tokens,
        attempt=record.attempt,
        challenger=record.challenger,
        reason=record.reason,
        created_at=record.created_at,
        updated_at=record.updated_at,
    )


def _audited(entry: Entry) -> AuditRow:
    return AuditRow(entry.at, entry.actor, entry.action.value, entry.window, entry.digest, entry.reason)


def _predicted(
    model: CostModel | None, k: int, blocks: Sequence[Block], drafts: Sequence[str]
) -> list[PredictedRow]:
    """Of the first draft and the served one, at the bands that the model was measured at."""
    if model is None:
        return []
    found = []
    for one in cells(blocks, batch=True, draft=True):
        if one.draft is None or one.batch is None or one.acceptance_length is None:
            continue
        if one.draft not in drafts:
            continue
        costs = model.by_batch.get(one.batch)
        if costs is not None and k in costs.verify:
            speed = one.acceptance_length / costs.round(k)
            found.append(PredictedRow(one.batch, one.draft, k, one.acceptance_length, speed))
    return found


def bands(steps: dict[int, int]) -> dict[int, int]:
    """Decode steps by batch band."""
    found: Counter[int] = Counter()
    for size, count in steps.items():
        found[batch_of(size)] += count
    return dict(sorted(found.items()))
