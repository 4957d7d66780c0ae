"""The registry against a real MLflow store on SQLite."""

import time
from pathlib import Path

import pytest

from tide_platform.config import Settings
from tide_platform.registry.mlflow_registry import (
    CHALLENGER,
    CHAMPION,
    DraftRegistry,
    DraftVersion,
    Point,
    RegistryUnavailable,
)


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
    files = {"settings.yaml": "deployment: demo"}
    run_id = registry.begin("demo/w00001", {"window": "w00001", "parent": "old"}, {"epochs": 4}, files)
    registry.log_points(run_id, [Point(step, {"loss": 1 / step}, time.time()) for step in range(1, 2001)])
    version = registry.register(run_id, folder, "new", "s3://b/demo/drafts/new", {"window": "w00001"}, {})
    tags = {"verdict": "passed", "verdict_against": "old", "verdict_reasons": "better"}
    files = {"verdict.json": '{"passed": true}', "verdict.html": "<p>passed</p>"}
    for _ in range(2):  # an attempt that died told it already
        registry.tell(version, metrics={"acceptance_length.window": 1.9}, tags=tags, files=files)
    registry.end(run_id)
    client = registry._client
    run, model = client.get_run(run_id), client.get_logged_model(version.model_id)
    assert run.info.status == "FINISHED" and run.data.params["epochs"] == "4"
    assert run.data.metrics["acceptance_length.window"] == 1.9
    assert run.data.tags["verdict"] == "passed"
    assert [(metric.key, metric.value) for metric in model.metrics or []] == [
        ("acceptance_length.window", 1.9)
    ]
    assert {file.path for file in client.list_artifacts(run_id)} == {"checkpoint", *files, "settings.yaml"}
    assert {file.path for file in client.list_logged_model_artifacts(version.model_id)} >= {
        *files,
        "tide.json",
    }
    assert run.data.tags["digest"] == model.tags["digest"] == "new" and model.tags["verdict"] == "passed"
    assert tags.items() <= client.get_model_version(registry.model, version.version).tags.items()
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


def _draft(registry: DraftRegistry, folder: Path, digest: str, window: str, **metrics: float) -> DraftVersion:
    run_id = registry.begin(window, {"window": window}, {})
    tags = {"window": window, "parent": "old", "samples": "256", "tokens": "9000", "lance_version": "7"}
    version = registry.register(run_id, folder, digest, f"s3://b/{digest}", tags, {"epochs": 4})
    registry.tell(version, metrics={name.replace("__", "."): value for name, value in metrics.items()})
    registry.end(run_id)
    return version


def test_models_are_found_and_ordered_by_the_figures_of_champion_and_slice(
    registry: DraftRegistry, folder: Path
):
    for digest, window, gain, ann in (("s1", "w1", 0.1, 1.4), ("s2", "w2", 0.3, 1.9), ("s3", "w3", 0.2, 1.7)):
        _draft(
            registry,
            folder,
            digest,
            window,
            gain__window=gain,
            champion__acceptance_length__window=1.3,
            acceptance_length__window__tenant__ann=ann,
        )
    experiment = registry._client.get_experiment_by_name("tide-drafts")
    assert experiment is not None
    found = registry._client.search_logged_models(
        [experiment.experiment_id],
        "metrics.`acceptance_length.window.tenant.ann` > 1.5 AND tags.window != 'w00001'",
        order_by=[{"field_name": "metrics.gain.window", "ascending": False}],
    )
    assert [model.tags["digest"] for model in found] == ["s2", "s3"]
    figures = {metric.key: metric.value for metric in found[0].metrics or []}
    assert figures["champion.acceptance_length.window"] == 1.3
    assert (found[0].params or {})["epochs"] == "4"


def test_what_became_of_a_draft_is_on_its_version_run_and_model(registry: DraftRegistry, folder: Path):
    version = _draft(registry, folder, "served", "w7")
    client, at = registry._client, (registry.model, version.version)
    back = {"rolled_back_at": "then", "rolled_back_by": "ann@host", "rolled_back_reason": "it was slow"}
    registry.tell(version, tags={"state": "rolled back", **back}, metrics={"live.acceptance_length": 1.4})
    for tags in (
        client.get_model_version(*at).tags,
        client.get_run(version.run_id).data.tags,
        client.get_logged_model(version.model_id).tags,
    ):
        assert back.items() <= tags.items() and tags["state"] == "rolled back"
    words = client.get_model_version(*at).description or ""
    assert "`old` fine-tuned on window w7: 256 samples, 9000 tokens, dataset version 7" in words
    assert "**Taken back** at then, by ann@host: it was slow." in words
    assert client.get_run(version.run_id).data.tags["mlflow.note.content"] == words
    assert client.get_run(version.run_id).data.metrics["live.acceptance_length"] == 1.4
    now = {"state": "served", "served_at": "now", "served_by": "ann@host", "served_reason": "it was not that"}
    for _ in range(2):
        registry.tell(version, tags=now, cleared=[*back, "replaced_at"])
    tags = client.get_model_version(*at).tags
    assert tags["state"] == "served" and not back.keys() & tags.keys()
    assert not back.keys() & client.get_run(version.run_id).data.tags.keys()
    assert not back.keys() & client.get_logged_model(version.model_id).tags.keys()
    words = client.get_model_version(*at).description or ""
    assert "Served since now" in words and "Taken back" not in words


def test_what_mlflow_refuses_is_told_by_name(registry: DraftRegistry, folder: Path):
    version = _draft(registry, folder, "refused", "w8")
    with pytest.raises(RegistryUnavailable, match="what became of draft refused"):
        registry.tell(version, metrics={"no such # name": 1.0})
