"""The page on MLflow holds the names that the code has."""

from pathlib import Path

from tide_platform.registry.names import markdown_tables

PAGE = Path(__file__).parents[3] / "docs" / "mlflow.md"


def test_the_page_holds_the_tables_of_the_code():
    text = PAGE.read_text()
    for heading, table in markdown_tables().items():
        assert f"## {heading}\n" in text
        assert f"\n{table}\n" in text, f"{heading}: put `registry.names.markdown_tables()` there"
