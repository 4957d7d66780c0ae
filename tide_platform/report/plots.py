"""The report's plots, each as SVG; an empty string where there is nothing to show."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from tide_platform.report.figures import Cell, Mark, Report, Saved, VerdictFigures
from tide_platform.report.svg import GREY, PALETTE, figure, plot_rates, svg

MOST_BARS = 12  # of tenants and of slices
WIDE = (9.2, 3.4)
SHORT = 8  # characters of a digest
_BAD = "#b3261e"


def colours_of(report: Report) -> dict[str, str]:
    """A colour for each draft, in order of appearance; the first is grey."""
    seen = dict.fromkeys(each.draft for each in report.acceptance if each.draft)
    first = report.saved.first
    rest = [draft for draft in seen if draft != first]
    found = {draft: PALETTE[i % len(PALETTE)] for i, draft in enumerate(rest)}
    return ({first: GREY} if first else {}) | found


def acceptance(report: Report, title: str) -> str:
    """Acceptance length over time by draft, with what happened to the served draft."""
    colours, made, axes = colours_of(report), *figure(*WIDE)
    shown = [each for each in report.acceptance if each.acceptance_length is not None]
    if not shown:
        return ""
    for draft in dict.fromkeys(each.draft for each in shown if each.draft):
        of = [each for each in shown if each.draft == draft]
        # a draft that came back later has a gap, not a line across what was served between
        for part in _runs(of, shown):
            label = draft[:SHORT] if part[0] is of[0] else None
            values = [each.acceptance_length for each in part]
            axes.plot(_times(part), values, "-o", color=colours[draft], markersize=3.5, label=label)
    _draw_marks(axes, report.marks)
    axes.set_ylabel("tokens a verify round")
    axes.margins(y=0.18)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, title="draft", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _time_axis(axes)
    return svg(made, axes, "acceptance", title)


def speed(report: Report, title: str) -> str:
    """A server's output rate over time, by batch band."""
    shown = [each for each in report.speed if each.tokens_per_s is not None]
    if not shown:
        return ""
    made, axes = figure(*WIDE)
    for i, batch in enumerate(sorted({each.batch for each in shown if each.batch})):
        of = [each for each in shown if each.batch == batch]
        colour = PALETTE[i % len(PALETTE)]
        axes.plot(
            _times(of), [each.tokens_per_s for each in of], "-o", color=colour, markersize=3.5, label=batch
        )
    _draw_marks(axes, report.marks)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("output tokens a second")
    axes.legend(frameon=False, title="requests\nat a time", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _time_axis(axes)
    return svg(made, axes, "speed", title)


def volume(report: Report, title: str) -> str:
    """Tokens of responses that ended in each stretch of time."""
    if not report.volume:
        return ""
    made, axes = figure(WIDE[0], 2.4)
    width = report.bin_s / 86_400
    left = [_day(each.ended_at // report.bin_s * report.bin_s) for each in report.volume]
    axes.bar(left, [each.tokens for each in report.volume], width * 0.92, align="edge", color=PALETTE[0])
    axes.set_ylabel("tokens")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _time_axis(axes)
    return svg(made, axes, "volume", title)


def concurrency(report: Report, title: str) -> str:
    """Output rate by batch band, of the first draft and the newest ones."""
    shown = [each for each in report.by_concurrency if each.tokens_per_s is not None]
    if not shown:
        return ""
    drafts = _some_drafts(report, shown)
    bands = sorted({each.batch for each in shown if each.batch})
    made, axes = figure()
    width = 0.8 / len(drafts)
    colours = colours_of(report)
    for place, draft in enumerate(drafts):
        of = {each.batch: each.tokens_per_s for each in shown if each.draft == draft}
        at = [i + (place - (len(drafts) - 1) / 2) * width for i, band in enumerate(bands) if band in of]
        heights = [of[band] for band in bands if band in of]
        axes.bar(at, heights, width * 0.92, color=colours[draft], label=draft[:SHORT])
    axes.set_xticks(range(len(bands)), [str(band) for band in bands])
    axes.set_xlabel("requests at a time, up to")
    axes.set_ylabel("output tokens a second")
    return svg(made, axes, "concurrency", title)


def tenants(report: Report, title: str) -> str:
    """Acceptance length of the tenants with most tokens, of the first draft and the newest ones."""
    shown = [each for each in report.by_tenant if each.acceptance_length is not None]
    if not shown:
        return ""
    tokens: dict[str, int] = {}
    for each in shown:
        tokens[each.tenant or ""] = tokens.get(each.tenant or "", 0) + each.tokens
    names = sorted(tokens, key=lambda name: (-tokens[name], name))[:MOST_BARS]
    colours, made, axes = colours_of(report), *figure(6.4, 1.2 + 0.34 * len(names))
    for draft in _some_drafts(report, shown):
        of = {each.tenant: each.acceptance_length for each in shown if each.draft == draft}
        rows = [i for i, name in enumerate(names) if name in of]
        axes.plot([of[names[i]] for i in rows], rows, "o", color=colours[draft], label=draft[:SHORT])
    axes.set_yticks(range(len(names)), [_cut(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("tokens a verify round")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, title="draft", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg(made, axes, "tenants", title)


def positions(verdict: VerdictFigures | None, title: str) -> str:
    if verdict is None or not verdict.by_position:
        return ""
    colours = {"champion": GREY, "challenger": PALETTE[0]}
    return plot_rates(verdict.by_position, colours, "positions", title)


def slices(verdict: VerdictFigures | None, title: str) -> str:
    """Champion and challenger on the slices with most requests."""
    if verdict is None or not verdict.slices:
        return ""
    rows = sorted(verdict.slices, key=lambda each: -each.requests)[:MOST_BARS]
    rows.sort(key=lambda each: (each.dimension, each.value))
    made, axes = figure(6.4, 1.2 + 0.34 * len(rows))
    for i, each in enumerate(rows):
        axes.plot([each.champion, each.challenger], [i, i], "-", color="#c3c8ce", zorder=1)
    for name, colour in (("champion", GREY), ("challenger", PALETTE[0])):
        axes.plot([getattr(e, name) for e in rows], range(len(rows)), "o", color=colour, label=name, zorder=2)
    labels = [f"{each.dimension} {_cut(each.value)} ({each.requests})" for each in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("tokens a verify round")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg(made, axes, "slices", title)


def savings(of: Saved, title: str) -> str:
    """Server time saved, added up over time."""
    if not of.stretches:
        return ""
    made, axes = figure(WIDE[0], 2.6)
    unit, name = (3600, "hours") if abs(of.saved_hours) >= 1 else (60, "minutes")
    ordered = sorted(of.stretches, key=lambda each: each.ended_at)
    sums = [0.0, *accumulate(each.saved_s / unit for each in ordered)]
    times = [_day(min(each.began_at for each in ordered)), *(_day(each.ended_at) for each in ordered)]
    axes.step(times, sums, where="post", color=PALETTE[2])
    axes.fill_between(times, sums, step="post", color=PALETTE[2], alpha=0.15)
    axes.axhline(0, color="#444444", linewidth=0.8)
    axes.set_ylabel(name)
    _time_axis(axes)
    return svg(made, axes, "savings", title)


def _some_drafts(report: Report, shown: Sequence[Cell], most: int = 4) -> list[str]:
    """The first draft and the newest ones, of those that have something to show."""
    known = {each.draft for each in shown}
    drafts = [draft for draft in colours_of(report) if draft in known]
    return drafts if len(drafts) <= most else [drafts[0], *drafts[1 - most :]]


def _runs(of: Sequence[Cell], every: Sequence[Cell]) -> list[list[Cell]]:
    """A draft's points, parted where another draft alone was served between two of them."""
    parts: list[list[Cell]] = []
    for each in of:
        before = parts[-1][-1] if parts else None
        if before is None or _between(before, each, every):
            parts.append([])
        parts[-1].append(each)
    return parts


def _between(one: Cell, other: Cell, every: Sequence[Cell]) -> bool:
    return any(
        each.draft != one.draft and each.began_at > one.ended_at and each.ended_at < other.began_at
        for each in every
    )


def _draw_marks(axes: Any, marks: Sequence[Mark]) -> None:
    """A line for each mark, numbered as in the table below the plot."""
    for number, mark in enumerate(marks, start=1):
        bad = mark.what in ("rolled back", "undone")
        axes.axvline(
            _day(mark.at), color=_BAD if bad else "#444444", linestyle="--" if bad else "-", linewidth=0.9
        )
        where = (_day(mark.at), 1.0)
        axes.annotate(
            str(number),
            where,
            xycoords=("data", "axes fraction"),
            xytext=(2, -9),
            textcoords="offset points",
            fontsize=8,
            color=_BAD if bad else "#222222",
        )


def _time_axis(axes: Any) -> None:
    from matplotlib import dates

    locator = dates.AutoDateLocator(tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=UTC))
    axes.set_xlabel("UTC")


def _times(of: Iterable[Cell]) -> list[float]:
    return [_day(each.at) for each in of]


def _day(at: float) -> float:
    """Matplotlib's time: days since 1970."""
    from matplotlib import dates

    return float(dates.date2num(datetime.fromtimestamp(at, UTC)))


def _cut(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
