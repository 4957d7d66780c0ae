"""The fifteen reports each have a row, and every test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "known-limits.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]


def test_every_report_has_a_row() -> None:
    assert [int(row[0].strip("| ")) for row in ROWS] == list(range(1, 16))


def test_a_row_names_tests_or_says_why_there_are_none() -> None:
    for row in ROWS:
        named = re.findall(r"`(tests/[^`]+)`", row[-1])
        assert named or "not here yet" in " ".join(row), row
        for path, name in (ref.split("::") for ref in named):
            assert re.search(rf"def {name}\(", (ROOT / path).read_text()), name
