"""Where the platform keeps what it can make again: one cache folder, moved by ``TIDE_HOME``."""

import os
from pathlib import Path


def tide_home() -> Path:
    """The cache folder (targets, workloads, imported drafts): ``TIDE_HOME``, else ``~/.cache/tide``."""
    return Path(os.environ.get("TIDE_HOME") or Path.home() / ".cache" / "tide").expanduser()


def targets_folder() -> Path:
    return tide_home() / "targets"


def workloads_folder() -> Path:
    return tide_home() / "workloads"
