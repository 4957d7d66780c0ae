"""The page of bad inputs is whole, and every test that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs" / "bad-inputs.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]
AREAS = {"trainer", "data", "capture", "gate"}


def test_every_case_has_a_row() -> None:
    assert [int(row[0].strip("| ")) for row in ROWS] == list(range(1, 24))


def test_named_tests_exist() -> None:
    named = [ref for row in ROWS for ref in re.findall(r"`(tests/[^`]+)`", row[-1])]
    assert len(named) > 20
    for ref in named:
        path, name = ref.split("::")
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), ref


def test_a_row_without_tests_names_its_area() -> None:
    assert not [row[0] for row in ROWS if "`tests/" not in row[-1] and row[-1].strip("| ") not in AREAS]
