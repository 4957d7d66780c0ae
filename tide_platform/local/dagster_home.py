"""Dagster's databases, made before anything opens them.

Of two processes that open a fresh home at once, both make the tables, and its version then has two heads:
every process that comes later ends with `Version table 'alembic_version' has more than one head`.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tide_platform.local.errors import StackError

_MAKE = "from dagster import DagsterInstance; DagsterInstance.get().dispose()"
_LAST = Path("schedules") / "schedules.db"  # of what Dagster makes
_LIMIT_S = 300


def make_databases(home: Path, environ: Mapping[str, str]) -> None:
    """Nothing where they are. ``environ`` has DAGSTER_HOME. Raises :class:`StackError`."""
    if (home / _LAST).exists():
        return
    try:
        subprocess.run(
            [sys.executable, "-c", _MAKE], env=dict(environ), check=True, capture_output=True, text=True,
            timeout=_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{home}: Dagster's databases were not made within {_LIMIT_S} s") from error
    except subprocess.CalledProcessError as error:
        words = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise StackError(f"{home}: Dagster's databases could not be made: {words}") from error
