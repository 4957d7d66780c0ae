"""The support table in the docs is the one in the code."""

from pathlib import Path

from tide_platform.engine.support import ADAPTERS, markdown_table

PAGE = Path(__file__).parents[3] / "docs" / "support.md"


def test_the_page_holds_the_table_of_the_code():
    text = PAGE.read_text()
    assert text.endswith(markdown_table()), "run `make docs`"
    assert all(version in text for version in ADAPTERS)
