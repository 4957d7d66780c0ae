"""The sensors that tell people, from the ledger and Dagster's runs to a webhook on loopback."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

import resources.cycle
from resources.runs import attempt_tags
from tests.fixtures.stand_in import stand_in
from tests.fixtures.webhook import Webhook, webhook
from tests.free_ports import free_port
from tide_platform.config import Settings, dump_settings
from tide_platform.control import evaluate
from tide_platform.control.audit import Action, Entry
from tide_platform.control.ledger import Ledger
from tide_platform.control.notify import COUNTS, VARIABLE
from tide_platform.control.records import Cut, Scan


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    with webhook() as kept:
        monkeypatch.setenv(VARIABLE, kept.url)
        yield kept


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    settings = Settings(state=tmp_path)
    settings.serving.port = free_port()
    settings.notify.tries, settings.notify.patience_s = 1, 0
    settings.ledger.url = f"sqlite:///{tmp_path}/ledger.db"
    (tmp_path / "tide.yaml").write_text(dump_settings(settings))
    monkeypatch.setenv("TIDE_CONFIG", str(tmp_path / "tide.yaml"))
    monkeypatch.setenv("TIDE_ADMIN_KEY", "a-test")
    return settings


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    ledger = Ledger(settings.ledger.url)
    ledger.cut("demo", Scan(), Scan(7, 10, 9, 0), [Cut(-1, 9, 7, 10, 100)])
    yield ledger
    ledger.close()
    resources.cycle._ledger.cache_clear()


def look() -> str:
    """A tick of `tell_what_happened`; what its page says."""
    from tide_platform.definitions import defs

    sensor = defs.resolve_sensor_def("tell_what_happened")
    with dg.build_sensor_context(resources=defs.resources) as context:
        result = sensor(context)
    assert isinstance(result, dg.SkipReason)
    return result.skip_message or ""


def test_a_rollback_and_a_dead_capture_reach_the_webhook(
    settings: Settings, ledger: Ledger, hook: Webhook
) -> None:
    ledger.note(Entry("demo", "run 1", Action.ROLLED_BACK, "it was worse", window="w00001", digest="abc"))
    with stand_in(settings.serving.port, "old") as server:
        assert "demo: draft abc of window w00001 rolled back" in look()
        server.live = False
        assert "capture is dead" in look()
        server.live = True
        look()
    assert hook.titles == [
        "demo: draft abc of window w00001 rolled back",
        f"demo: capture is dead on http://127.0.0.1:{settings.serving.port}",
        f"demo: capture is dead on http://127.0.0.1:{settings.serving.port}: over",
    ]
    assert hook.bodies[0]["message"] == "it was worse (by run 1)"


def test_a_webhook_that_refuses_fails_no_tick(settings: Settings, ledger: Ledger, hook: Webhook) -> None:
    ledger.note(Entry("demo", "sensor", Action.FAILED, "train broke", window="w00001"))
    hook.refuse = 1
    with stand_in(settings.serving.port, "old"):
        said = look()
        assert "1 deliveries failed; no address took the newest; it is tried again" in said
        assert "s3cret" not in said and not hook.bodies
        look()
    assert hook.titles == ["demo: window w00001 failed"]
    assert ledger.controls.get("demo", COUNTS) == {"messages": 1, "delivered": 1, "failed": 1}


def failed(job: str, tags: dict[str, str] | None = None) -> None:
    """A run of a job that fails, and what `tell_of_failed_runs` does then."""
    from tide_platform.definitions import defs

    key = (tags or {}).get("dagster/partition")
    with dg.instance_for_test() as instance:
        instance.add_dynamic_partitions("windows", ["demo/w00001"])
        run = defs.resolve_job_def(job).execute_in_process(
            instance=instance, raise_on_error=False, tags=tags, partition_key=key
        )
        assert not run.success
        event = run.filter_events(lambda e: e.event_type is dg.DagsterEventType.RUN_FAILURE)[0]
        context = dg.build_run_status_sensor_context(
            "tell_of_failed_runs", event, instance, run.dagster_run, resources=defs.resources
        ).for_run_failure()
        defs.resolve_sensor_def("tell_of_failed_runs")(context)


def test_a_run_that_nobody_tries_again_is_told_of(
    settings: Settings, ledger: Ledger, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no reference set\nat length")

    monkeypatch.setattr(evaluate, "evaluate_champion", broken)
    failed("evaluate_champion")
    (body,) = hook.bodies
    assert "of evaluate_champion failed" in body["title"]
    assert body["message"] == "reference_acceptance: RuntimeError: no reference set"


def test_of_an_attempt_and_of_a_rejected_draft_the_ledger_tells(
    settings: Settings, ledger: Ledger, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("train broke")

    monkeypatch.setattr("tide_platform.control.cycle.train_window", broken)
    partition = {"dagster/partition": "demo/w00001"}
    failed("adapt_draft", partition | attempt_tags(ledger.windows("demo")[0]))
    failed("adapt_draft", partition | {"tide/verdict": "rejected"})
    assert hook.titles == []
    failed("adapt_draft", partition)
    (title,) = hook.titles
    assert title.startswith("demo: run ") and title.endswith("of adapt_draft on demo/w00001 failed")
