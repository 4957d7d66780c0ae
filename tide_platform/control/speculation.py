"""What speculation costs, brings and is set to, by batch size: the table of ``tide speculation``.

SGLang changes the number of steps (``serving.adaptive``); the platform gives it the steps to choose among
and looks after what they bring.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tide_platform.config import Settings, TideError
from tide_platform.control.costs import usable_costs
from tide_platform.control.database import LedgerTooNew, LedgerUnreachable
from tide_platform.control.history import Block, total
from tide_platform.control.judge import CURVE_K
from tide_platform.control.ledger import Ledger, opened
from tide_platform.control.promotion import Verdict
from tide_platform.evaluation.cost_model import CostModel, speeds_of
from tide_platform.evaluation.speculation import (
    Acceptance,
    Speedup,
    candidate_steps,
    candidates,
    constant_rate,
    measured,
)
from tide_platform.serving.adaptive import FILE

VERDICTS = 50  # the newest are searched for one on the draft


class NothingToShow(TideError):
    """No cost model: there is no column to fill."""

    def __init__(self, costs: str):
        super().__init__(f"speculation: costs are {costs}")


@dataclass(frozen=True)
class Row:
    """At one batch size that was measured."""

    batch: int
    step_ms: float  # of the target alone
    rounds: dict[int, float]  # k -> cost of a round, plain steps
    speeds: dict[int, float]  # k -> predicted speed over the target alone; empty: acceptance not known
    steps: list[int]  # what SGLang is given to choose among; empty: not known
    live: Speedup | None


@dataclass(frozen=True)
class Speculation:
    """``stale``: the file that the server was started with names other steps than would be given now."""

    draft: str | None
    costs: str
    acceptance: Acceptance
    adaptive: bool
    stale: bool
    rows: list[Row] = field(default_factory=list)


def known_acceptance(settings: Settings, digest: str) -> Acceptance:
    """Of a draft that is about to be served, from the deployment's ledger. A ledger that cannot be read is
    said to be the reason that nothing is known: the server starts all the same.
    """
    try:
        with opened(settings.ledger.url) as ledger:
            return acceptance_of(settings, ledger, digest)
    except (LedgerUnreachable, LedgerTooNew) as error:
        return Acceptance([], f"the draft's acceptance is not known: {error}")


def acceptance_of(settings: Settings, ledger: Ledger, digest: str) -> Acceptance:
    """By the last verdict on the draft, else by its live requests of ``gate.histogram_hours``."""
    for record in reversed(ledger.last_verdicts(settings.deployment, VERDICTS)):
        if digest in (record.challenger, record.champion):
            verdict = Verdict.from_json(record.evidence)
            if verdict.on_window is None:
                continue
            of = verdict.on_window
            by_k = (of.challenger if digest == record.challenger else of.champion).by_k
            return Acceptance(by_k, f"acceptance of draft {digest} by the verdict on {verdict.window}")
    hours, k = settings.gate.histogram_hours, settings.serving.k
    since = time.time() - hours * 3600
    blocks = [b for b in ledger.history.blocks(settings.deployment, since) if b.draft == digest and b.rounds]
    length = total(blocks).acceptance_length if blocks else None
    if length is None:
        return Acceptance(
            [], f"acceptance of draft {digest} is not known: no verdict, no request in {hours:g} h"
        )
    requests = sum(b.requests for b in blocks)
    mixed = ", whatever SGLang adapted it to" if settings.serving.adaptive else ""
    return Acceptance(
        constant_rate(length, k, max(k, CURVE_K)),
        f"acceptance of draft {digest} by {requests} live requests, {length:.3f} at k = {k}{mixed}, "
        "as if all positions were alike",
    )


def look(settings: Settings, ledger: Ledger, draft: str | None, minutes: float) -> Speculation:
    """Of ``draft``, the one served; live figures of the newest ``minutes``.

    Raises :class:`NothingToShow` without a cost model.
    """
    model, costs = usable_costs(settings)
    if model is None:
        raise NothingToShow(costs)
    acceptance = Acceptance([], "no draft is served, and none was")
    live: dict[int, Speedup] = {}
    if draft is not None:
        acceptance = acceptance_of(settings, ledger, draft)
        since = time.time() - minutes * 60
        blocks = [b for b in ledger.history.blocks(settings.deployment, since) if b.draft == draft]
        live = measured(model, blocks)
    return Speculation(
        draft,
        costs,
        acceptance,
        settings.serving.adaptive,
        settings.serving.adaptive and _stale(settings, model, acceptance),
        _rows(model, acceptance.by_k, live),
    )


def _rows(model: CostModel, by_k: Sequence[float], live: dict[int, Speedup]) -> list[Row]:
    """Of the batch sizes that were measured, and those that live requests had."""
    rows = []
    for batch in sorted(model.by_batch.keys() | live.keys()):
        costs = model.near(batch)
        rounds = {k: costs.round(k) for k in (0, *sorted(costs.verify))}
        speeds = speeds_of(by_k, costs) if by_k else {}
        steps = candidate_steps(costs, by_k) if by_k else []
        rows.append(Row(batch, costs.step_ms, rounds, speeds, steps, live.get(batch)))
    return rows


def _stale(settings: Settings, model: CostModel, acceptance: Acceptance) -> bool:
    path = settings.state / FILE
    if settings.serving.adaptive_config is not None or not acceptance.by_k:
        return False
    return not path.exists() or _steps(json.loads(path.read_text())) != _steps(
        candidates(model, acceptance.by_k)
    )


def _steps(raw: dict[str, Any]) -> dict[str, list[int]]:
    return {batch: entry["candidate_steps"] for batch, entry in raw.items()}


def served_draft(settings: Settings, ledger: Ledger) -> str | None:
    """The draft that was served last by the ledger's history; of a deployment that never changed it, the one
    that its newest live requests had.
    """
    history = ledger.deployments(settings.deployment)
    if history:
        return history[-1]["served"]
    since = time.time() - settings.gate.histogram_hours * 3600
    blocks: list[Block] = ledger.history.blocks(settings.deployment, since)
    drafts = [block.draft for block in blocks if block.draft]
    if drafts:
        return drafts[-1]
    verdicts = ledger.last_verdicts(settings.deployment, 1)
    return verdicts[-1].champion if verdicts else None
