"""A fresh Dagster home has its databases before several processes open it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tide_platform.local.dagster_home import make_databases
from tide_platform.local.errors import StackError
from tide_platform.local.stack import DAGSTER_TEMPLATE

OPEN = "from dagster import DagsterInstance; DagsterInstance.get().get_run_records(limit=1)"


def test_three_processes_may_then_open_it_at_once(tmp_path: Path) -> None:
    shutil.copyfile(DAGSTER_TEMPLATE, tmp_path / "dagster.yaml")
    environ = os.environ | {"DAGSTER_HOME": str(tmp_path)}
    make_databases(tmp_path, environ)
    made = (tmp_path / "schedules" / "schedules.db").stat().st_mtime_ns
    several = [subprocess.Popen([sys.executable, "-c", OPEN], env=environ) for _ in range(3)]
    assert [process.wait(120) for process in several] == [0, 0, 0]
    make_databases(tmp_path, environ)
    assert (tmp_path / "schedules" / "schedules.db").stat().st_mtime_ns == made


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("storage: {nothing: 1}\n")
    with pytest.raises(StackError, match=f"{tmp_path}: Dagster's databases could not be made: "):
        make_databases(tmp_path, os.environ | {"DAGSTER_HOME": str(tmp_path)})
