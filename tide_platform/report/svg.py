"""Plots as SVG within a page: one look for the report and the demo, no file beside it."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# told apart by most eyes (Okabe and Ito 2008), on white
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#6a3d9a", "#444444")
GREY = "#8a8f98"


def figure(width: float = 6.4, height: float = 3.6) -> tuple[Any, Any]:
    """(figure, its axes), of so many inches."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots()


def svg(figure: Any, axes: Any, name: str, title: str) -> str:
    """The figure as one element of a page. ``name``: begins all of its ids, so that several figures stand on
    one page; ``title``: what it shows, in words, for who cannot see it.
    """
    from html import escape

    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1] and axes.get_legend() is None:
        axes.legend(frameon=False)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'((?:\bid="|url\(#|href="#))', rf"\g<1>{name}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title, quote=True)}" ', 1)


def plot_rates(
    by_name: Mapping[str, Sequence[float]], colours: Mapping[str, str], name: str, title: str
) -> str:
    """Acceptance rate at each draft position, given that the one before was accepted, as SVG."""
    made, axes = figure()
    for who, rates in by_name.items():
        axes.plot(range(1, len(rates) + 1), rates, "-o", color=colours[who], label=who)
    most = max((len(rates) for rates in by_name.values()), default=1)
    axes.set_xticks(range(1, most + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft token")
    axes.set_ylabel("share accepted")
    return svg(made, axes, name, title)


def write_page(path: Path, template: Path, **values: Any) -> None:
    """Write the page of a jinja2 template, whole or not at all."""
    import jinja2

    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page.filters |= values.pop("filters", {})
    text = page.from_string(template.read_text()).render(**values)
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.new")
    work.write_text(text)
    work.replace(path)
