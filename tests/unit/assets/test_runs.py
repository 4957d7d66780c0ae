"""Dagster's runs as the ledger sees them."""

import dagster as dg
import pytest

from resources.runs import MENDS_TAG, DagsterRuns, attempt_of, attempt_tags
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State, WindowKey

RECORD = WindowRecord(
    *(WindowKey("demo", "w00001"), State.OWED, 2, None, None, None, -1, 9, 3, 10, 100),
    *(None, None, None, None, 0.0, 0.0, None, None),
)


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


def a_run(instance: dg.DagsterInstance, **more: object) -> dg.DagsterRun:
    run = dg.DagsterRun("adapt_draft", **more)  # pyright: ignore[reportArgumentType]
    return instance.add_run(run)


def test_a_run_of_the_sensor_knows_its_attempt(instance: dg.DagsterInstance):
    run = a_run(instance, tags=attempt_tags(RECORD))
    assert attempt_of(run) == 2
    found = DagsterRuns(instance).of_attempt(RECORD.key, 2)
    assert found is not None and found.run_id == run.run_id
    assert DagsterRuns(instance).of_attempt(RECORD.key, 1) is None


def test_a_run_executed_again_is_one_by_hand(instance: dg.DagsterInstance):
    """Dagster copies the tags of the run that is executed again, the attempt's among them."""
    first = a_run(instance, tags=attempt_tags(RECORD))
    again = a_run(instance, tags=first.tags, parent_run_id=first.run_id, root_run_id=first.run_id)
    assert attempt_of(again) is None


def test_the_run_that_mends_a_deployment_is_found(instance: dg.DagsterInstance):
    runs = DagsterRuns(instance)
    assert runs.mending("demo") is None
    run = a_run(instance, tags={MENDS_TAG: "demo"})
    found = runs.mending("demo")
    assert found is not None and found.run_id == run.run_id and not found.finished
    assert runs.mending("other") is None
