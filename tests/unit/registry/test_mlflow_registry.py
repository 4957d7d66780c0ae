"""The registry against a real MLflow store on SQLite."""

import time
from pathlib import Path

import pytest

from tide_platform.config import Settings
from tide_platform.registry.mlflow_registry import CHALLENGER, CHAMPION, DraftRegistry, Point


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> DraftRegistry:
    """One for all tests: a new store takes seconds to make its tables."""
    folder = tmp_path_factory.mktemp("mlflow")
    registry = DraftRegistry(Settings(registry={"tracking_uri": f"sqlite:///{folder}/mlflow.db"}))  # type: ignore[arg-type]
    registry._client.create_experiment("tide-drafts", artifact_location=(folder / "artifacts").as_uri())
    return registry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tide.json").write_text('{"parent": "old"}')
    return tmp_path


def test_an_alias_that_was_never_set_is_none(registry: DraftRegistry):
    assert registry.alias(CHALLENGER) is None and registry.version_of("unheard") is None


def test_a_checkpoint_has_a_run_a_logged_model_and_a_version(registry: DraftRegistry, folder: Path):
    run_id = registry.begin("demo/w00001", {"window": "w00001", "parent": "old"}, {"epochs": 4})
    registry.log_points(run_id, [Point(step, {"loss": 1 / step}, time.time()) for step in range(1, 2001)])
    version = registry.register(run_id, folder, "new", "s3://b/demo/drafts/new", {"window": "w00001"}, {})
    registry.judge(version, {"acceptance_length.window": 1.9}, {"passed": True}, "passed")
    registry.end(run_id)
    client = registry._client
    run, model = client.get_run(run_id), client.get_logged_model(version.model_id)
    assert run.info.status == "FINISHED" and run.data.params["epochs"] == "4"
    assert run.data.metrics["acceptance_length.window"] == 1.9
    assert run.data.tags["verdict"] == "passed"
    assert [(metric.key, metric.value) for metric in model.metrics or []] == [
        ("acceptance_length.window", 1.9)
    ]
    assert {file.path for file in client.list_artifacts(run_id)} == {"checkpoint", "verdict.json"}
    assert run.outputs is not None and run.outputs.model_outputs[0].model_id == version.model_id
    assert registry.version_of("new") == version and version.uri == "s3://b/demo/drafts/new"


def test_the_same_content_is_registered_once(registry: DraftRegistry, folder: Path):
    versions = []
    for window in ("w00002", "w00003"):
        run_id = registry.begin(window, {"window": window}, {})
        versions.append(registry.register(run_id, folder, "same", "s3://b/same", {"window": window}, {}))
        registry.end(run_id)
    assert versions[0] == versions[1]


def test_aliases_move(registry: DraftRegistry, folder: Path):
    for digest in ("a", "b"):
        run_id = registry.begin(digest, {}, {})
        registry.point(CHAMPION, registry.register(run_id, folder, digest, f"s3://b/{digest}", {}, {}))
        registry.end(run_id)
        champion = registry.alias(CHAMPION)
        assert champion is not None and champion.digest == digest


def test_a_new_attempt_ends_the_run_that_a_dead_one_left_open(registry: DraftRegistry):
    dead = registry.begin("demo/w00009", {"window": "w00009", "attempt": "1"}, {})
    alive = registry.begin("demo/w00009", {"window": "w00009", "attempt": "2"}, {})
    assert registry._client.get_run(dead).info.status == "KILLED"
    assert registry._client.get_run(alive).info.status == "RUNNING"
    registry.end(alive, succeeded=False)
    assert registry._client.get_run(alive).info.status == "FAILED"
