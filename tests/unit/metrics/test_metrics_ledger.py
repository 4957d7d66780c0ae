"""What is told of the ledger, on both databases."""

import pytest
from sqlalchemy import insert

from tests.fixtures.watched import SERVER, fill, request, told
from tests.unit.metrics.conftest import NOW, Values
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.tables import controls
from tide_platform.metrics.ledger import ControlUnreadable, read_controls, read_ledger, read_live


def test_a_new_ledger_has_zeros_and_no_times(settings: Settings, ledger: Ledger, values: Values):
    found = values(read_ledger(settings, ledger)) | values(read_live(settings, ledger, lambda: NOW))
    assert found["tide_windows{owed}"] == found["tide_audit_total{rolled back}"] == 0
    assert found["tide_verdicts_total{passed}"] == found["tide_live_missed_requests_total"] == 0
    assert not [name for name in found if "timestamp" in name or "_info" in name]
    assert values(read_controls(settings, ledger)) == {}


def test_windows_verdicts_and_deployments(
    settings: Settings, ledger: Ledger, values: Values, clock: list[float]
):
    fill(ledger, NOW)
    found = values(read_ledger(settings, ledger))
    counts = {
        "tide_windows{deployed}": 1,
        "tide_windows{rejected}": 1,
        "tide_windows{running}": 1,
        "tide_windows{owed}": 1,
        "tide_windows{failed}": 0,
        "tide_windows_attempt": 1,  # of the open ones; the deployed one took two
        "tide_windows_attempts_allowed": 3,
        "tide_windows_retries_total": 1,
        "tide_windows_samples_wanted": 256,
        "tide_scan_rows": 50,
        "tide_scan_pending_samples": 7,
        "tide_verdicts_total{passed}": 1,
        "tide_verdicts_total{rejected}": 1,
        "tide_verdict_gain_ratio": 0.25,
        "tide_verdict_gain_lower_ratio": 0.2,
        "tide_deployments_total": 1,
        "tide_champion_info{new}": 1,
        "tide_champion_promoted_acceptance_length{new}": 2.5,
        "tide_audit_total{rolled back}": 1,
        "tide_audit_total{deployed}": 1,
        "tide_barred_drafts": 1,
        "tide_frozen": 1,
        "tide_rollout_unfinished": 1,
        "tide_rollout_info{next,canary}": 1,
    }
    assert {name: found[name] for name in counts} == counts
    times = [name for name in found if "timestamp" in name]
    assert len(times) == 7 and {found[name] for name in times} == {NOW}
    assert "tide_windows_oldest_timestamp_seconds{deployed}" not in found


def test_live_traffic(settings: Settings, ledger: Ledger, values: Values):
    fill(ledger, NOW)
    found = values(read_live(settings, ledger, lambda: NOW))
    ann = {
        "requests_total": 4,
        "aborted_total": 0,
        "tokens_total": 44,
        "rounds_total": 16,
        "accepted_total": 24,
        "decode_seconds_total": pytest.approx(0.4),
        "decoded_tokens_total": 40,
        "acceptance_length": 2.5,
    }
    assert {name: found[f"tide_live_{name}{{new,ann,4}}"] for name in ann} == ann
    assert found["tide_live_token_seconds{new,ann,4,0.99}"] == pytest.approx(0.01, rel=0.026)
    assert found["tide_live_aborted_total{new,bob,1}"] == 1
    assert found["tide_live_missed_requests_total"] == 1 and found["tide_live_groups_left_out"] == 0


def test_counters_are_of_all_time_and_gauges_of_the_last_minutes(
    settings: Settings, ledger: Ledger, values: Values
):
    fill(ledger, NOW)
    later = NOW + 2 * settings.metrics.live_seconds
    more = told([request(8, later - 1, rounds=4, accepted=0)])
    ledger.history.record("demo", SERVER, more)
    found = values(read_live(settings, ledger, lambda: later))
    assert found["tide_live_requests_total{new,ann,4}"] == 5
    assert found["tide_live_acceptance_length{new,ann,4}"] == 1.0
    assert "tide_live_acceptance_length{new,bob,1}" not in found


def test_groups_that_ended_long_ago_and_beyond_the_limit_are_left_out(
    settings: Settings, ledger: Ledger, values: Values
):
    fill(ledger, NOW)
    settings.metrics.live_groups = 1
    found = values(read_live(settings, ledger, lambda: NOW))
    assert "tide_live_requests_total{new,bob,1}" in found, "the one that had a request last"
    assert "tide_live_requests_total{new,ann,4}" not in found
    assert "tide_live_acceptance_length{new,ann,4}" not in found
    assert found["tide_live_groups_left_out"] == 1
    tomorrow = NOW + 3600 * settings.metrics.live_hours
    found = values(read_live(settings, ledger, lambda: tomorrow))
    assert not [name for name in found if name.startswith("tide_live_requests_total")]


def remember(ledger: Ledger, value: object) -> None:
    with ledger._database.write() as db:
        db.execute(insert(controls).values(deployment="demo", name="speedup", value=value, at=NOW))


def test_the_speedup_by_batch(settings: Settings, ledger: Ledger, values: Values):
    remember(ledger, {"1": 1.4, "8": 0.9})
    assert values(read_controls(settings, ledger)) == {
        "tide_speedup_ratio{1}": 1.4,
        "tide_speedup_ratio{8}": 0.9,
    }


@pytest.mark.parametrize("value", [{"1": "fast"}, [1.4], "fast"])
def test_a_control_of_another_version_is_named(settings: Settings, ledger: Ledger, value: object):
    remember(ledger, value)
    with pytest.raises(ControlUnreadable, match="speedup"):
        read_controls(settings, ledger)
