"""Tests of the gate with a real SGLang on the tiny target, run by `make test-gate`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_settings import K, settings_in

from tests.fixtures.tiny import TINY
from tests.unit.gate.gate_examples import draft_folder, loaded
from tide_platform.draft.checkpoint import load_draft, load_target_parts
from tide_platform.gate.example import capture_examples, gate_settings
from tide_platform.gate.run import Bench
from tide_platform.serving.own_server import Served, served

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gate)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_folder(tmp_path_factory.mktemp("gate") / "draft")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> Iterator[Served]:
    """The gate's own server, as the gate starts it."""
    room = tmp_path_factory.mktemp("gate-server")
    settings = settings_in(room / "deployment")
    with served(gate_settings(settings, draft, TINY, "transformers"), room) as found:
        yield found


@pytest.fixture(scope="session")
def bench(server: Served, draft: Path) -> Bench:
    """What the gate has at hand once the controlled example was captured."""
    parts = load_target_parts(TINY)
    return Bench(
        server.settings,
        draft,
        TINY,
        "transformers",
        K,
        parts,
        loaded(draft),
        load_draft(draft),
        capture_examples(server),
    )
