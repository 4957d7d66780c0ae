"""The environment that the locks give is the one that was meant."""

from importlib.metadata import version
from pathlib import Path

import assets
import resources

ROOT = Path(__file__).parents[3]


def test_assets_and_resources_are_ours() -> None:
    """Both are generic names; an installed package of the same name would go before an editable one."""
    for package in (assets, resources):
        assert Path(package.__file__ or "").is_relative_to(ROOT)


def test_dagster_and_its_libraries_are_of_one_release() -> None:
    """An open resolution once mixed dagster 1.13 with dagster-k8s 0.11, and `pip check` was content."""
    major, minor, patch = version("dagster").split(".")
    assert (major, minor) == ("1", "13")
    for library in ("dagster-k8s", "dagster-postgres"):
        assert version(library) == f"0.29.{patch}", library
    for library in ("dagster-webserver", "dagster-graphql", "dagster-pipes"):
        assert version(library) == version("dagster"), library


def test_the_locks_hold_no_addresses() -> None:
    for lock in (ROOT / "requirements").glob("*.txt"):
        assert "://" not in lock.read_text(), lock
