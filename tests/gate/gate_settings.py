"""A deployment of the tiny target, small enough to be served in a test."""

from pathlib import Path

from tests.fixtures.tiny import TINY
from tide_platform.config import Settings

K = 2


def settings_in(state: Path) -> Settings:
    return Settings.model_validate({
        "target": TINY,
        "state": state,
        "serving": {"threads": 1, "context_length": 256, "max_total_tokens": 2048, "k": K},
        "capture": {"ring_bytes": 16 << 20, "segment_bytes": 1 << 20},
        "training": {"threads": 1},
    })  # fmt: skip
