"""The demo's page: three plots and the figures, one HTML file that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tide_platform.local.demo.summary import Summary
from tide_platform.report.svg import figure, plot_rates, svg
from tide_platform.report.svg import write_page as write_template

TEMPLATE = Path(__file__).with_name("page.html.j2")
COLOURS = {"plain": "#8a8f98", "static": "#c8553d", "adapted": "#2a7f62"}

_SENT = ("traffic", "reference")  # phases whose requests are captured


@dataclass(frozen=True)
class Moment:
    """Acceptance of one finished request. ``at_s``: seconds since the demo began."""

    at_s: float
    draft: str  # static | adapted
    phase: str  # static, traffic, adapted, ...
    verify_rounds: int
    accepted_drafts: int


@dataclass(frozen=True)
class Speed:
    """One pass over held_out prompts."""

    who: str  # plain | static | adapted
    concurrency: int
    tokens_per_s: float


def write_page(
    path: Path,
    summary: Summary,
    moments: Sequence[Moment],
    speeds: Sequence[Speed],
    by_position: dict[str, list[float]],
    addresses: dict[str, str],
) -> None:
    """Write the page, whole or not at all. ``by_position``: acceptance rate of draft token 1, 2, ..."""
    title = "Acceptance rate by draft position"
    write_template(
        path,
        TEMPLATE,
        summary=summary,
        addresses=addresses,
        plots=[
            ("Acceptance length over time", plot_acceptance(moments)),
            ("Output tokens a second by concurrency", plot_speed(speeds)),
            (title, plot_rates(by_position, COLOURS, "positions", title)),
        ],
    )


def plot_acceptance(moments: Sequence[Moment]) -> str:
    """Acceptance length over time, as SVG: a ratio of sums over every few requests that ended together."""
    made, axes = figure()
    for (draft, phase), group in _groups(moments).items():
        points = [_merge(group[first : first + 8]) for first in range(0, len(group), 8)]
        style = "-o" if phase in _SENT else "--s"
        label = f"{draft}, {phase if phase in _SENT or phase == 'general' else 'held_out'}"
        known = label in axes.get_legend_handles_labels()[1]
        axes.plot(
            *zip(*points, strict=True),
            style,
            color=COLOURS[draft],
            label=None if known else label,
            markersize=4,
        )
    axes.set_xlabel("seconds since the demo began")
    axes.set_ylabel("tokens a verify round")
    return svg(made, axes, "acceptance", "Acceptance length over time")


def plot_speed(speeds: Sequence[Speed]) -> str:
    """Throughput by concurrency, as SVG: the median of each draft's passes, and every pass as a dot."""
    made, axes = figure()
    levels = sorted({speed.concurrency for speed in speeds})
    width = 0.26
    for place, who in enumerate(COLOURS):
        for at, level in enumerate(levels):
            values = [
                speed.tokens_per_s for speed in speeds if (speed.who, speed.concurrency) == (who, level)
            ]
            if values:
                x = at + (place - 1) * width
                label = who if who not in axes.get_legend_handles_labels()[1] else None
                axes.bar(x, median(values), width * 0.92, color=COLOURS[who], label=label, alpha=0.85)
                axes.plot([x] * len(values), values, ".", color="black", markersize=4)
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("output tokens a second")
    return svg(made, axes, "speed", "Output tokens a second by concurrency")


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    import statistics

    return statistics.median(values)


def _groups(moments: Sequence[Moment]) -> dict[tuple[str, str], list[Moment]]:
    groups: dict[tuple[str, str], list[Moment]] = {}
    for moment in sorted(moments, key=lambda moment: moment.at_s):
        groups.setdefault((moment.draft, moment.phase), []).append(moment)
    return groups


def _merge(group: Sequence[Moment]) -> tuple[float, float]:
    """(mean time, acceptance length) of a few requests."""
    rounds = sum(moment.verify_rounds for moment in group)
    accepted = sum(moment.accepted_drafts for moment in group)
    return sum(moment.at_s for moment in group) / len(group), 1 + accepted / max(1, rounds)
