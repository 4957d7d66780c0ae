"""docs/metrics.md has the table of the code, and the names are as Prometheus wants them."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from tests.unit.metrics.promql import promtool
from tide_platform.metrics.catalogue import CATALOGUE, SECTIONS, markdown_tables
from tide_platform.metrics.sheet import Sheet

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_holds_the_tables_of_the_code():
    assert PAGE.read_text().endswith(markdown_tables()), "run `make docs`"


def test_no_name_stands_twice():
    assert len(CATALOGUE) == sum(len(metrics) for metrics in SECTIONS.values())


def test_prometheus_finds_no_fault_with_names_and_texts():
    sheet = Sheet()
    for metric in CATALOGUE.values():
        sheet.put(metric.name, 1, *metric.labels)

    class Every:
        def collect(self):
            return sheet.families()

    registry = CollectorRegistry()
    registry.register(Every())
    text = generate_latest(registry).decode()
    promtool("check", "metrics", given=text)
    assert all(f"\n{name}" in text for name in CATALOGUE)
