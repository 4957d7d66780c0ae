"""Fixtures on real services. Servers are started once a session: a start costs half a minute."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_drafts import lens_draft
from engine_server import EngineServer, start_server

from tide_platform.serving.target import prepare_target

# Files that take minutes each, longest first: begun last, one of them would run on alone
LONGEST = (
    "test_bench.py",
    "test_serve.py",
    "test_corpus_loop.py",
    "test_engine_reload.py",
    "test_engine_traffic.py",
    "test_data_ranks.py",
    "test_trainer_pods_dagster.py",
    "test_spec_capture_patch.py",
    "test_cpu_backend.py",
    "test_bench_train_peer.py",
    "test_serve_next.py",
    "test_adaptive_speculation.py",
    "test_loop.py",
    "test_images_build.py",
    "test_capture_last_hidden.py",
    "test_adapt_draft_pods.py",
    "test_engine_capture.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def target() -> Path:
    """SmolLM2-135M-Instruct, in the cache from the first run on."""
    return prepare_target().folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Iterator[Callable[..., EngineServer]]:
    """``server(draft, extra=[…], dtype=…, radix_cache=…, chunked_prefill_size=…)``: SGLang on the CPU."""
    started: list[EngineServer] = []

    def start(draft: Path | None, extra: list[str] | None = None, **serving: Any) -> EngineServer:
        folder = tmp_path_factory.mktemp("server")
        started.append(start_server(folder, target, draft, extra or [], **serving))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """A draft that hits where text repeats, and only there."""
    return lens_draft(target, tmp_path_factory.mktemp("drafts") / "lens")


@pytest.fixture(scope="session")
def speculative(server: Callable[..., EngineServer], draft: Path) -> EngineServer:
    """fp32, k = 2, radix cache, prompts split at 64 tokens, a KV cache that six requests fill."""
    crowded = ["--schedule-conservativeness", "0.05"]
    return server(draft, crowded, radix_cache=True, chunked_prefill_size=64, max_total_tokens=768)
