"""What the clock starts, and when an asset is stale."""

from collections.abc import Mapping
from datetime import timedelta

import dagster as dg

from assets.capture import hidden_states
from assets.deployment import serving_draft
from assets.jobs import evaluate_champion, maintain_dataset
from tide_platform.config.schema import Schedule


def schedules(of: Schedule) -> list[dg.ScheduleDefinition]:
    """`maintenance` and `daily_evaluation`. Raises Dagster's error on a cron string that is none."""
    common = {"execution_timezone": of.time_zone, "default_status": dg.DefaultScheduleStatus.RUNNING}
    return [
        dg.ScheduleDefinition("maintenance", job=maintain_dataset, cron_schedule=of.maintenance, **common),
        dg.ScheduleDefinition(
            "daily_evaluation", job=evaluate_champion, cron_schedule=of.evaluation, **common
        ),
    ]


def watched(spec: dg.AssetSpec, of: Schedule) -> dg.AssetSpec:
    """The asset with the time after which its page says that it is stale, where it has one."""
    hours: Mapping[dg.AssetKey, float] = {
        hidden_states.key: of.hidden_states_hours,
        serving_draft.key: of.serving_draft_hours,
    }
    if spec.key not in hours:
        return spec
    return dg.apply_freshness_policy(
        spec, dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=hours[spec.key]))
    )
