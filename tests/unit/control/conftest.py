"""Ledgers on both databases."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.databases import Postgres, postgres_server

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A real server of this session's own, listening on a Unix socket alone."""
    with postgres_server(tmp_path_factory.mktemp("pg")) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    server: Postgres = request.getfixturevalue("postgres")
    return server.database(f"ledger{next(_numbers)}")
