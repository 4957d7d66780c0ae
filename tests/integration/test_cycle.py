"""A cycle step by step with the real dataset, trainer, replay, object store and MLflow, on the tiny target.

The SGLang server alone is stood in for: what it must do at a reload is tested on the real one elsewhere.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tide_platform.bench.tick import NoRuns
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import Settings, draft_digest, target_digest
from tide_platform.control import champion, cycle, overview
from tide_platform.control.audit import Action
from tide_platform.control.consistency import check_challenger
from tide_platform.control.dataset import Dataset
from tide_platform.control.evaluate import evaluate_champion
from tide_platform.control.guard import Barred
from tide_platform.control.hands import DraftUnknown, NothingBefore, promote, roll_back
from tide_platform.control.ledger import Ledger
from tide_platform.control.overview import look
from tide_platform.control.promotion import Verdict
from tide_platform.control.reconcile import tick
from tide_platform.control.states import State
from tide_platform.control.trainer_process import run_trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

pytestmark = pytest.mark.integration
SAMPLES, REFERENCE = 24, 12
TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]


class FakeServer:
    """Serves a draft by name; reloads what it is told to."""

    base_url = "http://127.0.0.1:0"

    def __init__(self, digest: str):
        self.digest = digest

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None: ...

    def status(self) -> dict[str, Any]:
        return {"draft_digest": self.digest, "capture": {"enabled": True}}

    def requests(self, after: int = 0) -> dict[str, Any]:
        return {"requests": [], "last": 0}

    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]:
        assert draft_digest(path) == digest
        self.digest = digest
        return {"ok": True, "pause_s": 0.1, "target_checksum_before": "t", "target_checksum_after": "t"}


def capture(count: int, tenant: str, seed: int, target: str) -> list[Sample]:
    """What a server would have captured of ``count`` prompts."""
    from tiny import prompts, say

    samples = say(prompts(count, length=24, seed=seed), 40, prefix=f"{tenant}-")
    meta = {"tenant": tenant, "target_digest": target, "captured_at": 1.8e9}
    return [Sample(replace(sample.meta, **meta), sample.tensors) for sample in samples]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The tiny target with an untrained draft, a reference set and enough samples for a window."""
    from tiny import AUX_LAYERS, TINY

    from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
    from tide_platform.store.hidden_states import open_store

    folder = tmp_path_factory.mktemp("deployment")
    draft = new_draft(load_target_parts(TINY), np.arange(128), AUX_LAYERS)
    save_draft(folder / "first", draft, {"made": "for this test"})
    settings = Settings(target=TINY, draft=folder / "first", state=folder / "state")
    settings.storage.uri = str(folder / "store")
    settings.registry.tracking_uri = f"sqlite:///{folder}/mlflow.db"
    settings.ledger.url = f"sqlite:///{folder}/ledger.db"
    settings.window.min_samples = SAMPLES
    settings.training.epochs, settings.training.threads = 8, 1
    settings.training.learning_rate = 2e-3
    digest = target_digest(TINY)
    store = open_store(settings)
    store.ensure(StreamMeta(digest, 96, 256, AUX_LAYERS, 16))
    store.append(capture(REFERENCE, "reference", 1, digest), ["segment-1"])
    store.append(capture(SAMPLES, "maths", 2, digest), ["segment-2"])
    return settings


@pytest.fixture
def server(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    assert settings.draft is not None
    server = FakeServer(draft_digest(settings.draft))
    for module, name in ((champion, "connect_all"), (overview, "glance_at_all")):
        monkeypatch.setattr(module, name, lambda _: nullcontext([server]))
    settings.rollout.idle_seconds = 0
    monkeypatch.chdir(tmp_path)  # MLflow's artifacts
    yield server


def _taken_back_and_served_again(
    settings: Settings, ledger: Ledger, server: FakeServer, first: str, second: str
) -> None:
    """`tide rollback`, `tide promote` and `tide status`, as their commands call them."""
    from tide_platform.registry.mlflow_registry import DraftRegistry

    done = roll_back(settings, ledger, "ann@host", "it felt slow")
    assert (done.served, done.previous, server.digest) == (first, second, first)
    registry = DraftRegistry(settings)
    assert _state(registry, first) == (
        "served",
        f"in place of {second}, which was taken back: it felt slow",
        None,
    )
    assert _state(registry, second) == ("rolled back", "the gate passed", "it felt slow")
    with pytest.raises(Barred, match=f"tide promote {second} --unbar"):
        promote(settings, ledger, second[:8], "ann@host", "again")
    with pytest.raises(NothingBefore):
        roll_back(settings, ledger, "ann@host", "further")
    with pytest.raises(DraftUnknown, match=first):
        promote(settings, ledger, "zzz", "ann@host", "no such draft")
    ledger.guard.freeze("demo", "ann@host", "release day")
    promote(settings, ledger, second[:8], "ann@host", "it was not that", unbar=True)
    assert _state(registry, second) == ("served", "it was not that", None)
    assert _state(registry, first)[0] == "replaced"
    seen = look(settings, ledger)
    assert seen.champion == server.digest == second and seen.agreed
    assert seen.windows == {"deployed": 1} and seen.frozen is not None
    (verdict,) = seen.verdicts
    assert verdict.on_window is not None
    assert seen.at_promotion == verdict.on_window.challenger.acceptance_length
    assert [entry.action for entry in ledger.audit("demo")] == [
        Action.DEPLOYED,
        Action.BARRED,
        Action.ROLLED_BACK,
        Action.FROZEN,
        Action.UNBARRED,
        Action.PROMOTED,
    ]


def _evaluated(settings: Settings, ledger: Ledger, verdict: Verdict, served: str) -> None:
    """The day after: the served draft on the reference set, as the verdict had found it, and in MLflow."""
    from tide_platform.registry.mlflow_registry import DraftRegistry

    for day in (1, 2):
        found = evaluate_champion(settings, ledger, clock=lambda day=day: day * 86400.0)
    judged = verdict.on_reference
    assert judged is not None and found.champion == served and found.requests == judged.requests
    assert found.found == judged.challenger
    client = DraftRegistry(settings)._client
    points = client.get_metric_history(found.mlflow_run, "daily.acceptance_length")
    assert [(point.step, point.value) for point in points] == [
        (1440, found.found.acceptance_length),
        (2880, found.found.acceptance_length),
    ]
    figures = found.to_json()
    assert {f"acceptance_length.k{k}" for k in (1, 2, 3, 4, 5)} <= set(figures)
    assert "no cost model was measured" in figures["costs"]


def _state(registry: Any, digest: str) -> tuple[str, str, str | None]:
    """(state, why it was served, why it was taken back), as its registered version tells."""
    version = registry.version_of(digest)
    tags = registry._client.get_model_version(registry.model, version.version).tags
    why = tags["served_reason"]
    return (
        tags["state"],
        "the gate passed" if why.startswith("passed:") else why,
        tags.get("rolled_back_reason"),
    )


def _compared_in_mlflow(settings: Settings, trained: cycle.Trained, verdict: Verdict) -> None:
    """The challenger beside its champion, on the run and on the logged model, by documented names."""
    from tide_platform.registry.mlflow_registry import DraftRegistry
    from tide_platform.registry.names import named

    registry = DraftRegistry(settings)
    client, version = registry._client, registry.version_of(trained.challenger)
    assert version is not None
    run, model = client.get_run(version.run_id), client.get_logged_model(version.model_id)
    assert [name for name in run.data.metrics if len(named(name)) != 1] == []
    figures = {metric.key: metric.value for metric in model.metrics or []}
    assert figures == pytest.approx(verdict.metrics()) and figures.items() <= run.data.metrics.items()
    of_tenant = "acceptance_length.window.tenant.maths"
    assert figures[of_tenant] > figures[f"champion.{of_tenant}"]
    files = {file.path for file in client.list_artifacts(version.run_id)}
    assert files == {"settings.yaml", "checkpoint", "verdict.json", "verdict.html"}
    assert run.data.params["serving.k"] == str(settings.serving.k) == (model.params or {})["serving.k"]
    words = client.get_model_version(registry.model, version.version).description or ""
    assert f"`{trained.parent}` (version 1) fine-tuned on window w00001: {SAMPLES} samples" in words
    assert f"**Passed** against `{trained.parent}`" in words


def train(job: Path, on_step: Any, stop: Any) -> None:
    run_trainer([*TIDE, "train", "--job", str(job)], {}, on_step, stop)


def test_a_window_is_trained_judged_and_deployed(settings: Settings, server: FakeServer):
    from tide_platform.registry.mlflow_registry import CHALLENGER, CHAMPION, DraftRegistry

    first = server.digest
    ledger = Ledger(settings.ledger.url)
    assert champion.ensure_champion(settings, ledger).digest == first
    found = tick(settings, ledger, Dataset(settings), NoRuns())
    assert found.request is not None and found.request.samples == SAMPLES
    turn = cycle.Turn(settings, ledger, found.request.key, "run-1", 1)

    trained = cycle.train_window(turn, train)
    assert trained.parent == first != trained.challenger
    assert trained.summary["steps"] > 0 and not list((settings.state / "work").iterdir())
    registry = DraftRegistry(settings)
    assert registry.alias(CHALLENGER) == registry.version_of(trained.challenger)
    run = registry._client.get_run(trained.mlflow_run)
    assert run.data.tags["parent"] == first and run.info.status == "FINISHED"
    assert len(registry._client.get_metric_history(trained.mlflow_run, "loss")) == trained.summary["steps"]

    verdict = cycle.judge_window(turn)
    assert verdict.on_window is not None and verdict.on_reference is not None
    assert verdict.passed, verdict.summary
    assert verdict.champion == first and ledger.get(turn.key).state is State.GATED
    assert cycle.judge_window(turn) == verdict  # once is enough
    _compared_in_mlflow(settings, trained, verdict)

    checked = check_challenger(settings, ledger, turn.key)
    assert checked.passed and checked.draft_digest == trained.challenger
    assert {check.on for check in checked.checks} == {"draft"}  # no server was started for it
    deployed = cycle.deploy_window(turn)
    assert (deployed.previous, server.digest) == (first, trained.challenger)
    assert registry.alias(CHAMPION) == registry.version_of(trained.challenger)
    status = cycle.status(settings)
    assert [(each.state, each.verdict) for each in status] == [(State.DEPLOYED, verdict)]
    _evaluated(settings, ledger, verdict, trained.challenger)
    _taken_back_and_served_again(settings, ledger, server, first, trained.challenger)
    assert registry.alias(CHAMPION) == registry.version_of(trained.challenger)
    provenance = json.loads((settings.drafts_folder / trained.challenger / "tide.json").read_text())
    assert provenance["window"] == "demo/w00001"
    ledger.close()


class GivenUp(Exception):
    """The run that watched the trainer was cancelled."""


def test_a_later_attempt_goes_on_with_the_training_that_an_earlier_one_began(
    settings: Settings, server: FakeServer, caplog: pytest.LogCaptureFixture
):
    from tide_platform.registry.mlflow_registry import DraftRegistry
    from tide_platform.store.hidden_states import open_store

    samples = capture(SAMPLES, "code", 3, target_digest(settings.target))  # type: ignore[arg-type]
    renamed = [Sample(replace(s.meta, sample_id=f"2-{s.meta.sample_id}"), s.tensors) for s in samples]
    open_store(settings).append(renamed, ["segment-3"])
    ledger = Ledger(settings.ledger.url)
    found = tick(settings, ledger, Dataset(settings), NoRuns())
    assert found.request is not None
    key = found.request.key
    told: list[tuple[str, int]] = []

    def cancelled(job: Path, on_step: Any, stop: Any) -> None:
        def until_fifth(record: dict[str, Any]) -> None:
            on_step(record)
            if record["step"] == 5:
                raise GivenUp

        train(job, until_fifth, stop)

    def watched(job: Path, on_step: Any, stop: Any) -> None:
        train(job, lambda record: (told.append((record["event"], record["step"])), on_step(record)), stop)

    with pytest.raises(GivenUp):
        cycle.train_window(cycle.Turn(settings, ledger, key, "run-2", 1), cancelled)
    assert ledger.release(ledger.get(key), "it was cancelled", 3).attempt == 2
    trained = cycle.train_window(cycle.Turn(settings, ledger, key, "run-3", 2), watched)

    past = [step for event, step in told if event == "past_step"]
    assert past[:5] == [1, 2, 3, 4, 5] and told[len(past)] == ("step", len(past) + 1)
    assert [step for _, step in told] == list(range(1, trained.summary["steps"] + 1))
    registry = DraftRegistry(settings)
    curve = registry._client.get_metric_history(trained.mlflow_run, "loss")
    assert [point.step for point in curve] == [step for _, step in told]  # the whole run, not its end alone
    waits = registry._client.get_metric_history(trained.mlflow_run, "wait_seconds")
    assert len(waits) == len(curve) and not list((settings.state / "work").iterdir())
    told_of = json.loads((champion.fetch_draft(settings, trained.challenger) / "tide.json").read_text())
    assert (told_of["window"], told_of["attempt"], told_of["past_windows"]) == (str(key), 2, ["w00001"])
    assert told_of["data"]["past"]["count"] > 0
    ledger.close()
