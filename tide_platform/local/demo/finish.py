"""From what was measured to ``summary.json`` and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tide_platform.config import Settings
from tide_platform.control.records import WindowRecord
from tide_platform.local.demo import plan, summary
from tide_platform.local.demo.clock import Clock
from tide_platform.local.demo.measure import Figures
from tide_platform.local.demo.report import Moment, write_page
from tide_platform.local.demo.watch import SENSOR_TAG
from tide_platform.local.errors import StackError
from tide_platform.local.graphql import Run

ENDS: dict[str, Literal["deployed", "rejected", "failed"]] = {"deployed": "deployed", "rejected": "rejected"}


class NotServed(StackError):
    """The loop says that a draft was deployed, the server serves another."""

    def __init__(self, promoted: str, served: str):
        super().__init__(f"draft {promoted} was promoted, but the server serves {served}; see .tide/logs")
        self.promoted, self.served = promoted, served


class CycleFailed(StackError):
    """The window's attempts are used up."""

    def __init__(self, window: str, lines: Sequence[str]):
        why = "".join(f"\n    {line}" for line in lines)
        super().__init__(
            f"the cycle failed: window {window}, see its run on the Dagster page and .tide/logs{why}"
        )
        self.window, self.lines = window, list(lines)


@dataclass(frozen=True)
class Outcome:
    """Everything that the summary is made of."""

    settings: Settings
    options: plan.Options
    clock: Clock
    window: WindowRecord
    run: Run | None
    verdict: dict[str, Any] | None
    why_failed: list[str]
    static_draft: str
    served_draft: str
    figures: dict[str, Figures]
    general: dict[str, float]
    held_out: int
    moments: list[Moment]
    dropped: int
    addresses: dict[str, str]
    folder: Path


def conclude(outcome: Outcome) -> summary.Summary:
    """Write ``summary.json`` and ``index.html``. Raises :class:`NotServed`, :class:`CycleFailed`."""
    window = outcome.window
    if window.state == "deployed" and outcome.served_draft != window.challenger:
        raise NotServed(window.challenger or "?", outcome.served_draft)
    result = summarize(outcome)
    write_page(
        outcome.folder / "index.html",
        result,
        outcome.moments,
        [speed for figures in outcome.figures.values() for speed in figures.speeds()],
        {
            who: outcome.figures[who].by_position()
            for who in ("static", "adapted")
            if outcome.figures[who].reports
        },
        outcome.addresses,
    )
    result.write(outcome.folder / "summary.json")
    if result.outcome == "failed":
        raise CycleFailed(window.key.window, outcome.why_failed)
    return result


def summarize(outcome: Outcome) -> summary.Summary:
    """The typed summary."""
    window, level = outcome.window, plan.HEADLINE.concurrency
    static = _draft(outcome.figures["static"], outcome.static_draft, level)
    deployed = window.state == "deployed"
    adapted = _draft(outcome.figures["adapted"], window.challenger or "", level) if deployed else None
    return summary.Summary(
        workload=outcome.options.workload,
        held_out_prompts=outcome.held_out,
        k=outcome.settings.serving.k,
        outcome=ENDS.get(window.state.value, "failed"),
        plain=summary.Plain(tokens_per_s=round(outcome.figures["plain"].tokens_per_s(level), 2)),
        static=static,
        adapted=adapted,
        ratio=_ratio(static, adapted) if adapted else None,
        general=summary.General(
            before=_round(outcome.general["before"]), after=_maybe(outcome.general.get("after"))
        ),
        window=summary.Window(
            samples=window.samples, tokens=window.tokens, lance_version=window.lance_version
        ),
        dagster=summary.DagsterRun(run_id=window.run_id, launched_by=_launched_by(outcome.run)),
        mlflow=_mlflow(outcome.settings, window),
        verdict=_verdict(outcome.verdict),
        served_draft=outcome.served_draft,
        seconds=outcome.clock.total(),
        samples_dropped=outcome.dropped,
    )


def _draft(figures: Figures, digest: str, level: int) -> summary.Draft:
    return summary.Draft(
        acceptance_length=_round(figures.acceptance_length(level)),
        tokens_per_s=round(figures.tokens_per_s(level), 2),
        draft=digest,
    )


def _ratio(static: summary.Draft, adapted: summary.Draft) -> summary.Ratio:
    return summary.Ratio(
        acceptance_length=_round(adapted.acceptance_length / static.acceptance_length),
        tokens_per_s=_round(adapted.tokens_per_s / static.tokens_per_s),
    )


def _launched_by(run: Run | None) -> str | None:
    """Name of the sensor that asked for the run; None for a run by hand."""
    return run.tags.get(SENSOR_TAG) if run else None


def _mlflow(settings: Settings, window: WindowRecord) -> summary.MlflowRun:
    """The checkpoint in the registry, as it stands now."""
    from tide_platform.registry.mlflow_registry import CHALLENGER, CHAMPION, DraftRegistry

    registry = DraftRegistry(settings)
    version = registry.version_of(window.challenger) if window.challenger else None
    alias = None
    for name in (CHAMPION, CHALLENGER) if version else ():
        found = registry.alias(name)
        if alias is None and found is not None and version is not None and found.version == version.version:
            alias = name
    return summary.MlflowRun(
        run_id=window.mlflow_run, model_version=version.version if version else None, alias=alias
    )


def _verdict(evidence: dict[str, Any] | None) -> summary.VerdictWords | None:
    if not evidence:
        return None
    names = ("passed", "champion", "challenger", "reasons")
    return summary.VerdictWords(**{name: evidence[name] for name in names})


def _round(value: float) -> float:
    return round(value, 4)


def _maybe(value: float | None) -> float | None:
    return None if value is None else _round(value)
