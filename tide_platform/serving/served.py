"""What a running server says that it serves."""

from pathlib import Path

from tide_platform.config import Settings
from tide_platform.serving.client import SglangClient
from tide_platform.serving.target import resolve_target


def served_target(base_url: str, settings: Settings) -> Path:
    """The folder of the model that answers at ``base_url``; that of the settings if it is not on this disk.

    Raises :class:`ServerUnreachable`.
    """
    with SglangClient(base_url) as client:
        named = Path(client.model_info()["model_path"])
    return named if (named / "tokenizer.json").is_file() else resolve_target(settings)
