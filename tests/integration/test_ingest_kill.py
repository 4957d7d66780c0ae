"""Exactly once on a local dataset, whatever dies when."""

import pytest
from ingest_faults import kill_in_a_loop

from tide_platform.config import Settings


@pytest.mark.integration
def test_kill_9_at_random_points(tmp_path):
    settings = Settings(
        storage={"uri": str(tmp_path / "store")},
        state=tmp_path,
        ingest={"commit_seconds": 0, "poll_seconds": 0.01},
    )
    log = kill_in_a_loop(settings, kills=9, seed=20)
    assert "Traceback" not in log
