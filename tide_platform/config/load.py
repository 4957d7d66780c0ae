"""Reads the configuration: one YAML file, then ``TIDE_<SECTION>__<NAME>`` variables over it."""

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tide_platform.config.errors import ConfigError
from tide_platform.config.schema import CONFIG_VERSION, Settings

PREFIX = "TIDE_"
# variables of that prefix that are no settings: where things are, and what parents tell their children
NOT_SETTINGS = {"TIDE_HOME", "TIDE_CONFIG", "TIDE_ENGINE_CONFIG", "TIDE_ADMIN_KEY", "TIDE_NOTIFY__URLS"}


def load_settings(path: Path | None = None, environ: dict[str, str] | None = None) -> Settings:
    """The configuration of ``path``, else of the file that ``TIDE_CONFIG`` names, else the defaults.

    ``TIDE_SERVING__PORT=31000`` overrides ``serving.port``; values are read as YAML. Raises
    :class:`ConfigError`, which names the file or variable and the setting.
    """
    environ = dict(os.environ) if environ is None else environ
    if path is None and environ.get("TIDE_CONFIG"):
        path = Path(environ["TIDE_CONFIG"])
    raw = read_yaml(path) if path else {}
    version = raw.get("config_version", CONFIG_VERSION)
    if version != CONFIG_VERSION:
        raise ConfigError(
            f"{path}: config_version {version} is not {CONFIG_VERSION}, the one this release reads; "
            "run `tide config migrate`"
        )
    for variable, value in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable not in NOT_SETTINGS:
            _set(raw, variable, value)
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ConfigError(f"{path or 'configuration'}: {where}: {first['msg']}") from error


def dump_settings(settings: Settings) -> str:
    """The configuration as YAML, all values explicit, such that :func:`load_settings` reads it back."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a configuration file. Raises :class:`ConfigError`, which names the file."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(raw).__name__}")
    return raw


def _set(raw: dict[str, Any], variable: str, value: str) -> None:
    *sections, name = variable.removeprefix(PREFIX).lower().split("__")
    node = raw
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{variable}: {section} is no section of the configuration")
    node[name] = yaml.safe_load(value)
