"""Configuration, paths, digests, the root of the errors: the bottom layer, imports nothing of the others."""

from tide_platform.config.digest import draft_digest, target_digest
from tide_platform.config.errors import ConfigError, TideError
from tide_platform.config.load import dump_settings, load_settings
from tide_platform.config.schema import Settings

__all__ = [
    "ConfigError",
    "Settings",
    "TideError",
    "draft_digest",
    "dump_settings",
    "load_settings",
    "target_digest",
]
