"""The table of faults in the docs is the one in the code, whose texts the tests of training pods assert."""

from pathlib import Path

import pytest

from tide_platform.cluster.table import with_table

PAGE = Path(__file__).parents[3] / "docs" / "trainer-pods.md"


def test_the_page_holds_the_table_of_the_code() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run `make docs`"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="faults"):
        with_table("# A page\n")
