"""The configuration as it may be shown: without passwords."""

import re
from typing import Any

import yaml

from tide_platform.config.schema import Settings

HIDDEN = "***"
_USER = re.compile(r"(://[^/?#@:]*:).*@")  # to the last @: what is hidden too much harms nobody
_QUERY = re.compile(r"([?&][^=&]*(?:pass|secret|token|key|credential)[^=&]*=)[^&]*", re.IGNORECASE)


def shown_settings(settings: Settings) -> str:
    """YAML of all values; the passwords of URLs, and of their queries, are hidden."""
    return yaml.safe_dump(_shown(settings.model_dump(mode="json")), sort_keys=False)


def shown_url(text: str) -> str:
    """A URL without its password; any other text as it is."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(rf"\g<1>{HIDDEN}@", text))


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shown(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return shown_url(value) if isinstance(value, str) else value
