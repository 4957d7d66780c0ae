"""What MLflow is told has names that are documented, and every documented name is told."""

import json
import re
import time
from typing import Any

import pytest

from tests.fixtures.week import verdict
from tests.unit.control.test_live_metrics import FakeRegistry, record
from tide_platform.config import Settings
from tide_platform.config.redact import shown_settings, shown_url
from tide_platform.control.audit import Action
from tide_platform.control.champion import _tell
from tide_platform.control.progress import LiveMetrics
from tide_platform.control.promotion import Comparison, Interval, Measured, Predicted, Verdict
from tide_platform.control.records import WindowRecord
from tide_platform.control.rollouts import Rollout, Step
from tide_platform.control.states import State, WindowKey
from tide_platform.control.told import of_rollout, of_verdict, training_tags
from tide_platform.control.watch import Limits, compare_live
from tide_platform.evaluation.sequence import Evidence
from tide_platform.evaluation.slices import Slice
from tide_platform.evaluation.throughput import Throughput
from tide_platform.registry.mlflow_registry import RegistryUnavailable
from tide_platform.registry.names import ARTIFACTS, METRICS, MOST_VALUES, TAGS, named, value_part

KEY = WindowKey("demo", "w00001")


def full_verdict(tenants: int = 3) -> Verdict:
    """With all that a verdict may hold."""
    slices = [Slice("tenant", f"t{i}", 100 - i, 1.4, 1.6) for i in range(tenants)]
    slices += [Slice(d, v, 9, 1.4, 1.6) for d, v in (("prompt_tokens", "<= 64"), ("flags", "none"))]
    slices += [Slice("draft_version", "abc", 9, 1.4, 1.6), Slice("temperature", "> 1", 9, 1.4, 1.6)]
    measured = Measured(1.5, [1.3, 1.5], [0.4, 0.2])
    on = Comparison(
        20,
        measured,
        measured,
        Interval(0.1, 0.05, 0.2),
        Evidence(20, 1.1, 1.05, 1.2, 0.95, 0.02, 9.0),
        slices,
    )
    predicted = [Predicted(8, {0: 1.0, 2: 1.2}, {0: 1.0, 2: 1.3})]
    return Verdict(
        str(KEY),
        "old",
        "new",
        2,
        0.95,
        0.02,
        0.95,
        True,
        ["better"],
        on,
        on,
        predicted=predicted,
        costs="here",
        throughput=Throughput(1.2, 1.3, 1.08, 1.05, 1.1, 0.95, adaptive=False, steps=900),
    )


def rollout(action: Action = Action.DEPLOYED, **evidence: Any) -> Rollout:
    evidence = {"action": action.value, **evidence}
    return Rollout(
        1, "demo", "w00001", "r", "ann@host", "it is better", "new", "old", ["u"], Step.PROMOTING, evidence
    )


def watched() -> dict[str, Any]:
    def requests(accepted: int) -> list[dict[str, Any]]:
        one = {"rounds": 10, "accepted": accepted, "token_ms": 20.0, "reason": "stop"}
        one |= {"tenant": "ann", "concurrency": 1.0}
        return [one, one | {"reason": "abort"}]

    return compare_live(requests(4), requests(8), Limits(2, 0.99, 0.05, 0.25, 0.05)).to_json()


def told_metrics() -> set[str]:
    registry = FakeRegistry()
    with LiveMetrics(registry, "run") as metrics:  # type: ignore[arg-type]
        metrics.on_step(record(1))
    names = {name for point in registry.points for name in point.values}
    names |= of_verdict(full_verdict()).metrics.keys()
    return names | of_rollout(rollout(), True, {"watched": watched()}, time.time())["new"].metrics.keys()


def test_every_metric_has_one_documented_name_and_every_name_is_told():
    told = told_metrics()
    assert {name: len(named(name)) for name in told} == dict.fromkeys(told, 1)
    assert [each.pattern for each in METRICS if not any(each.matches(name) for name in told)] == []
    assert named("acceptance_length.other") == named("loss2") == []


def test_every_tag_and_file_is_documented():
    window = WindowRecord(
        KEY, State.RUNNING, 1, "r", 0.0, "r", 0, 9, 3, 10, 900, None, None, None, None, 0.0, 0.0, None, None
    )
    told = [of_verdict(full_verdict())]
    for served, action in ((True, Action.DEPLOYED), (True, Action.ROLLED_BACK), (False, Action.DEPLOYED)):
        told += of_rollout(rollout(action), served, {"undone": "slow"}, 1e9).values()
    tags = set(training_tags(window, "r", "old", "1")).union(*(each.tags for each in told))
    tags = tags.union(*(each.cleared for each in told))
    assert tags | {"deployment", "origin", "digest", "uri"} == TAGS.keys()
    assert {"verdict.json", "verdict.html"} <= ARTIFACTS.keys() and "settings.yaml" in ARTIFACTS


def test_a_rollouts_end_is_told_of_both_drafts():
    found = of_rollout(rollout(), True, {"watched": watched()}, 1e9)
    assert found["new"].tags["state"] == "served" and found["old"].tags["state"] == "replaced"
    assert found["old"].tags["replaced_by"] == "new"
    live = found["new"].metrics
    assert (live["live.acceptance_length"], live["champion.live.acceptance_length"]) == (1.8, 1.4)
    assert (live["live.requests"], live["live.aborted"], live["live.token_ms_p50"]) == (2, 1, 20.0)
    by_hand = of_rollout(rollout(Action.ROLLED_BACK), True, {}, 1e9)
    assert by_hand["old"].tags["rolled_back_reason"] == "it is better" and not by_hand["new"].metrics
    undone = of_rollout(rollout(watched=watched()), False, {"undone": "worse"}, 1e9)
    assert undone["new"].tags["rolled_back_reason"] == "worse" and undone["old"].tags == {"state": "served"}
    assert undone["new"].metrics["live.acceptance_length"] == 1.8, "what the ledger knew of a dead one"


def test_a_registry_that_does_not_take_it_stops_no_rollout(caplog: pytest.LogCaptureFixture):
    class Down:
        def version_of(self, digest: str) -> None:
            raise RegistryUnavailable("http://mlflow", "looking for it", "no answer")

    _tell(Down(), rollout(), True, {})  # type: ignore[arg-type]
    (said,) = caplog.messages
    assert "how the rollout of new ended is not in MLflow" in said and "no answer" in said


def test_of_many_tenants_those_with_most_requests_are_metrics():
    metrics = full_verdict(tenants=50).metrics()
    named_tenants = {name for name in metrics if name.startswith("acceptance_length.window.tenant.")}
    assert len(named_tenants) == MOST_VALUES and "acceptance_length.window.tenant.t0" in named_tenants
    assert not any("tenant" in name for name in full_verdict().metrics(slices=False))


@pytest.mark.parametrize(
    "value", ["ann", "a@b", "a#b", "x" * 300, "<= 64", "> 4096", "..", "", "ä", "a/b", "none"]
)
def test_a_slices_value_is_a_part_of_a_name(value: str):
    from mlflow.utils.validation import _validate_metric_name

    name = f"acceptance_length.window.tenant.{value_part(value)}"
    _validate_metric_name(name)
    assert len(named(name)) == 1 and len(name) < 250


def test_values_that_look_alike_stay_apart():
    assert value_part("<= 64") == "up_to_64" and value_part("> 0.5") == "over_0.5"
    assert len({value_part(value) for value in ("a@b", "a#b", "a b", "a_b", "A_b")}) == 5


def test_the_verdicts_page_shows_names_and_runs_none():
    from dataclasses import replace

    found = verdict("demo/w1", "old", "new", (1.3, 1.6))
    assert found.on_window is not None
    hostile = replace(found.on_window, slices=[Slice("tenant", "<script>x</script> | y", 3, 1.0, 1.1)])
    page = of_verdict(replace(found, on_window=hostile)).files["verdict.html"]
    assert "<table>" in page and "&lt;script&gt;" in page and "<script>" not in page
    rows = re.findall(r"<tr>.*?</tr>", page, re.DOTALL)
    assert all(row.count("<td>") in (0, 5, 6) for row in rows)
    assert json.loads(of_verdict(found).files["verdict.json"])["challenger"] == "new"


def test_settings_are_shown_without_passwords():
    settings = Settings()
    settings.ledger.url = (
        "postgresql+psycopg2://tide:hun/ter@2@db:5432/tide?sslmode=require&sslpassword=hunter3"
    )
    settings.registry.tracking_uri = "https://ann:hunter4@mlflow/"
    text = shown_settings(settings)
    assert "hunter" not in text and "hun/" not in text and "ter@2" not in text
    assert "postgresql+psycopg2://tide:***@db:5432/tide?sslmode=require&sslpassword=***" in text
    assert "endpoint: null" in text and "min_samples: 256" in text
    for plain in (
        "sqlite:///.tide/x.db",
        "s3://bucket/a",
        "http://127.0.0.1:30000",
        "postgresql://u@/d?host=/tmp",
    ):
        assert shown_url(plain) == plain
