"""The report as one self-contained HTML page."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tide_platform.report import plots
from tide_platform.report.figures import Report
from tide_platform.report.gather import bands
from tide_platform.report.live import label_of_width
from tide_platform.report.svg import write_page

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write_report(path: Path, report: Report) -> None:
    """Whole or not at all. The figures are in the page as JSON too (``<script id="figures">``)."""
    drawn = {
        "acceptance": plots.acceptance(report, "Acceptance length of live requests over time, by draft"),
        "speed": plots.speed(report, "Output tokens a second of a server over time, by requests at a time"),
        "volume": plots.volume(report, "Tokens of responses over time"),
        "concurrency": plots.concurrency(report, "Output tokens a second by requests at a time and draft"),
        "tenants": plots.tenants(report, "Acceptance length by tenant and draft"),
        "positions": plots.positions(report.verdict, "Acceptance rate by position of the draft token"),
        "slices": plots.slices(report.verdict, "Acceptance length by slice, champion and challenger"),
        "savings": plots.savings(report.saved, "Server time saved, added up over time"),
    }
    write_page(
        path,
        TEMPLATE,
        report=report,
        figures=report.to_json(),
        plots=drawn,
        now=_length_of(report, report.served.digest if report.served else None),
        first=_length_of(report, report.saved.first),
        bands=bands(report.steps),
        bin=label_of_width(report.bin_s),
        filters={
            "when": when,
            "short": _short,
            "num": _num,
            "pct": _percent,
            "tone": _tone,
            "hours": _hours,
            "code": _code,
        },
    )


def when(at: float | None) -> str:
    """``2026-11-30 07:47 UTC``."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _length_of(report: Report, draft: str | None) -> dict[str, Any] | None:
    """Live requests of one draft in the report's time; None of nothing."""
    of = [each for each in report.by_concurrency if each.draft == draft and draft is not None]
    if not of:
        return None
    rounds = sum(each.rounds for each in of)
    length = 1 + sum(each.accepted for each in of) / rounds if rounds else None
    return {"requests": sum(each.requests for each in of), "acceptance_length": length}


def _short(digest: str | None) -> str:
    return (digest or "")[:8]


def _num(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:+.{digits}%}"


def _hours(value: float) -> str:
    """Hours, or a smaller unit where that reads better."""
    if abs(value) >= 1:
        return f"{value:,.1f} h"
    return f"{value * 60:.1f} min" if abs(value) >= 1 / 60 else f"{value * 3600:.1f} s"


def _tone(word: str) -> str:
    """Class of a state's or a mark's colour; the word itself always stands beside it."""
    if word in ("deployed", "promoted", "passed"):
        return "good"
    return "bad" if word in ("failed", "rolled back", "undone", "rejected", "barred") else "plain"


def _code(text: str) -> Any:
    """What stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
