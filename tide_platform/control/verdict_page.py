"""A verdict as a page: Markdown for Dagster's asset page and the registry, HTML for who opens a run's
artifacts.
"""

from collections.abc import Sequence
from html import escape

from tide_platform.control.promotion import Comparison, Predicted, Verdict
from tide_platform.evaluation.slices import Slice
from tide_platform.evaluation.throughput import Throughput

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
  body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 1.5rem auto; padding: 0 1rem;
    color: #22262b; }}
  table {{ border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }}
  td, th {{ padding: .25rem 1rem .25rem 0; text-align: left; border-bottom: 1px solid #e3e6ea; }}
</style></head><body>
<h1>{title}</h1>
<p>Challenger <code>{challenger}</code> against champion <code>{champion}</code>.</p>
{body}
</body></html>
"""


def page(verdict: Verdict) -> str:
    """Reasons, and tables of both drafts: on both sets, by batch size, by number of steps, by slice."""
    lines = [
        f"**{'passed' if verdict.passed else 'rejected'}** at k = {verdict.k}",
        "",
        "| set | requests | champion | challenger | gain | interval |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, each in (("window", verdict.on_window), ("reference", verdict.on_reference)):
        if each is not None:
            lines.append(
                f"| {name} | {each.requests} | {each.champion.acceptance_length:.3f} | "
                f"{each.challenger.acceptance_length:.3f} | {each.gain.point:+.1%} | "
                f"{each.gain.lower:+.1%} to {each.gain.upper:+.1%} |"
            )
    lines += ["", *(f"- {reason}" for reason in verdict.reasons)]
    lines += _throughput_table(verdict.throughput)
    lines += _speed_table(verdict.predicted, verdict.costs)
    return "\n".join(lines + _slice_table(verdict.on_window, verdict.below_floor, verdict.slice_floor))


def verdict_html(verdict: Verdict) -> str:
    """:func:`page` as HTML; HTML within it (a tenant's name) is shown, not run."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    return _PAGE.format(
        title=escape(f"Verdict on {verdict.window}"),
        challenger=escape(verdict.challenger),
        champion=escape(verdict.champion),
        body=markdown.render(page(verdict)),
    )


def _throughput_table(found: Throughput | None) -> list[str]:
    if found is None:
        return []
    lines = [
        "",
        f"Predicted tokens a second over the target alone, at the batch sizes of {found.steps} decode steps "
        + ("and each draft's fastest k" if found.adaptive else "and the k served"),
        "",
        "| batch | time | champion | k | challenger | k |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {each.batch}{'' if each.measured else ' (not measured)'} | {each.time_share:.0%} | "
        f"{each.champion:.2f} | {each.champion_k} | {each.challenger:.2f} | {each.challenger_k} |"
        for each in found.by_batch
    ]
    whole = f"| all | 100% | {found.champion:.2f} | | {found.challenger:.2f} | |"
    gain = f"{found.ratio - 1:+.1%} ({found.lower - 1:+.1%} to {found.upper - 1:+.1%})"
    return [*lines, whole, "", f"Gain in predicted tokens a second: {gain}"]


def _speed_table(predicted: Sequence[Predicted], costs: str) -> list[str]:
    if not predicted:
        return ["", f"Predicted speed: {costs}"] if costs else []
    ks = [k for k in predicted[0].challenger if k]
    lines = [
        "",
        f"Predicted speed over the target alone, champion → challenger ({costs}):",
        "",
        "| batch | " + " | ".join(f"k = {k}" for k in ks) + " |",
        "| --- |" + " --- |" * len(ks),
    ]
    for each in predicted:
        pairs = (f"{each.champion[k]:.2f} → {each.challenger[k]:.2f}" for k in ks)
        lines.append(f"| {each.batch} | " + " | ".join(pairs) + " |")
    return lines


def _slice_table(compared: Comparison | None, lost: Sequence[Slice], floor: float | None) -> list[str]:
    if compared is None or not compared.slices:
        return []
    lines = ["", "| slice | requests | champion | challenger | gain |", "| --- | --- | --- | --- | --- |"]
    return lines + [
        f"| {_cell(each.name)} | {each.requests} | {each.champion:.3f} | {each.challenger:.3f} | "
        f"{each.gain:+.1%}{f' **below the floor of {floor:.2f}**' if each in lost else ''} |"
        for each in compared.slices
    ]


def _cell(text: str) -> str:
    """A tenant's name may hold what ends a cell."""
    return text.replace("|", "\\|")
