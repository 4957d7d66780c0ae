"""What the Dagster definitions hold, and that loading them is light."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# names are for the life of the project (design 3): a change here is a decision, not a slip
EXPECTED = {
    "assets": {
        "acceptance_report": {
            "deps": ["draft_checkpoint"],
            "partitions": "windows",
            "pool": None,
            "runs": True,
        },
        "draft_checkpoint": {
            "deps": ["hidden_states"],
            "partitions": "windows",
            "pool": "training/demo",
            "runs": True,
        },
        "dataset_upkeep": {"deps": [], "partitions": None, "pool": None, "runs": True},
        "hidden_states": {"deps": [], "partitions": "windows", "pool": None, "runs": False},
        "reference_acceptance": {"deps": ["serving_draft"], "partitions": None, "pool": None, "runs": True},
        "serving_draft": {
            "deps": ["acceptance_report"],
            "partitions": "windows",
            "pool": "deployment/demo",
            "runs": True,
        },
    },
    "checks": {
        "acceptance_report:challenger_is_better": {"blocking": True},
        "acceptance_report:reference_is_held": {"blocking": False},
        "draft_checkpoint:draft_is_consistent": {"blocking": True},
    },
    "fresh_hours": {"hidden_states": 48.0, "serving_draft": 336.0},
    "jobs": {
        "adapt_draft": [
            "acceptance_report",
            "acceptance_report:challenger_is_better",
            "acceptance_report:reference_is_held",
            "draft_checkpoint",
            "draft_checkpoint:draft_is_consistent",
            "serving_draft",
        ],
        "evaluate_champion": ["reference_acceptance"],
        "maintain_dataset": ["dataset_upkeep"],
        "mend_deployment": [],
    },
    "schedules": {
        "daily_evaluation": {"job": "evaluate_champion", "cron": "45 3 * * *", "status": "RUNNING"},
        "maintenance": {"job": "maintain_dataset", "cron": "15 3 * * *", "status": "RUNNING"},
    },
    "sensors": {
        "enough_hidden_states": {"jobs": ["adapt_draft"], "interval_s": 5, "status": "RUNNING"},
        "tell_of_failed_runs": {"jobs": [], "interval_s": 30, "status": "RUNNING"},
        "tell_what_happened": {"jobs": [], "interval_s": 30, "status": "RUNNING"},
        "watch_champion": {"jobs": ["mend_deployment"], "interval_s": 10, "status": "RUNNING"},
    },
    "resources": ["cycle", "trainer"],
}

SNAPSHOT = """
import json, sys
from tide_platform.definitions import defs

graph = defs.resolve_asset_graph()
names = ("assets", "checks", "fresh_hours", "jobs", "schedules", "sensors")
out = {name: {} for name in names} | {"resources": sorted(defs.resources)}
for key in graph.get_all_asset_keys():
    node = graph.get(key)
    pools = sorted(node.pools) if node.is_executable else []
    out["assets"][key.to_user_string()] = {
        "deps": sorted(parent.to_user_string() for parent in node.parent_keys),
        "partitions": node.partitions_def and node.partitions_def.name,
        "pool": pools[0] if pools else None,
        "runs": node.is_executable,
    }
    if node.freshness_policy:
        hours = node.freshness_policy.fail_window.to_timedelta().total_seconds() / 3600
        out["fresh_hours"][key.to_user_string()] = hours
for key in graph.asset_check_keys:
    name = f"{key.asset_key.to_user_string()}:{key.name}"
    out["checks"][name] = {"blocking": graph.get(key).blocking}
for job in defs.jobs:
    layer = defs.resolve_job_def(job.name).asset_layer
    checks = [f"{key.asset_key.to_user_string()}:{key.name}" for key in layer.asset_graph.asset_check_keys]
    out["jobs"][job.name] = sorted([key.to_user_string() for key in layer.selected_asset_keys] + checks)
for schedule in defs.schedules:
    out["schedules"][schedule.name] = {
        "job": schedule.job_name,
        "cron": schedule.cron_schedule,
        "status": schedule.default_status.value,
    }
for sensor in defs.sensors:
    out["sensors"][sensor.name] = {
        "jobs": [target.job_name for target in sensor.targets],
        "interval_s": sensor.minimum_interval_seconds,
        "status": sensor.default_status.value,
    }
heavy = ["torch", "lance", "mlflow", "boto3", "transformers", "kubernetes", "sglang", "apprise"]
out["heavy"] = [name for name in heavy if name in sys.modules]
print(json.dumps(out))
"""


def test_the_definitions_are_as_named_and_load_nothing_heavy(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
    # from another folder: the installed `assets` and `resources` must be found, not the working tree's
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SNAPSHOT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("heavy") == []
    assert found == EXPECTED


def test_the_workspace_names_the_module():
    assert "tide_platform.definitions" in (ROOT / "workspace.yaml").read_text()
