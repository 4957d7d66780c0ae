"""Brings a configuration file of an earlier release to the version that this one reads."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tide_platform.config.errors import ConfigError
from tide_platform.config.load import read_yaml
from tide_platform.config.schema import CONFIG_VERSION

# version -> what makes the file one version newer; version 1 is the first, so there is none yet
STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


def migrate_file(path: Path) -> tuple[int, int]:
    """Rewrite ``path`` at the current version and keep the old file as ``PATH.bak``: (version before, after).

    A file at the current version is left as it is. Raises :class:`ConfigError` where no step leads on.
    """
    raw = read_yaml(path)
    before = version = raw.get("config_version", CONFIG_VERSION)
    while version != CONFIG_VERSION:
        if version not in STEPS:
            raise ConfigError(f"{path}: no way from config_version {version} to {CONFIG_VERSION}")
        raw = STEPS[version](raw)
        version = raw["config_version"]
    if before != version:
        backup = path.with_name(path.name + ".bak")
        work = path.with_name(f".{path.name}.{os.getpid()}")
        work.write_text(yaml.safe_dump(raw, sort_keys=False))
        path.replace(backup)
        work.replace(path)
    return before, version
