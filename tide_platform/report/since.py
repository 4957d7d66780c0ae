"""How far back: ``7d``, ``24h``, ``90m``."""

import re

from tide_platform.config import TideError

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


class BadSince(TideError):
    """A length of time that cannot be read."""

    def __init__(self, text: str):
        super().__init__(f"--since {text!r} is no length of time; write 90m, 24h, 7d or 2w")
        self.text = text


def seconds(text: str) -> float:
    """Raises :class:`BadSince`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip())
    if found is None or not float(found[1]):
        raise BadSince(text)
    return float(found[1]) * _UNITS[found[2]]
