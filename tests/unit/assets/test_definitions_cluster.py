"""What `cluster.trainer` changes of the Dagster definitions: a sensor, the executor where asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHOW = """
import json, sys
from tide_platform.definitions import defs
keys = {getattr(each, "op", None) and each.op.name: each for each in defs.assets}
draft = keys["draft_checkpoint"]
print(json.dumps({
    "executor": defs.executor.name,
    "sensors": [each.name for each in defs.sensors],
    "tags": list(draft.op.tags),
    "heavy": sorted({"kubernetes", "dagster_k8s", "torch"} & set(sys.modules)),
}))
"""


@pytest.mark.parametrize("through", [None, "pipes", "executor"])
def test_the_definitions_follow_the_cluster_section(tmp_path: Path, through: str | None) -> None:
    (tmp_path / "tide.yaml").write_text(
        f"cluster: {{trainer: {{profile: cpu, image: i, through: {through}}}}}" if through else "{}"
    )
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        cwd=ROOT,
        env=os.environ | {"TIDE_CONFIG": str(tmp_path / "tide.yaml"), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = json.loads(done.stdout.splitlines()[-1])
    assert ("pods_left_behind" in shown["sensors"]) is (through is not None)
    by_step = through == "executor"
    assert shown["executor"] == ("k8s" if by_step else "in_process")
    assert ("dagster-k8s/config" in shown["tags"]) is by_step
    if not by_step:
        assert shown["heavy"] == []
