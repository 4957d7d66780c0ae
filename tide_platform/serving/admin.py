"""SGLang's admin key: given by TIDE_ADMIN_KEY, else made once and kept in a file of mode 0600."""

import os
import secrets
from pathlib import Path

from tide_platform.config import Settings, TideError

VARIABLE = "TIDE_ADMIN_KEY"


class AdminKeyMissing(TideError):
    """No admin key is known, so the server's own routes cannot be asked."""

    def __init__(self, path: Path):
        super().__init__(
            f"no admin key: neither {VARIABLE} nor {path} is there; "
            "`tide serve` with the same configuration makes it"
        )
        self.path = path


def admin_key_file(settings: Settings) -> Path:
    return settings.state / "admin.key"


def read_admin_key(settings: Settings) -> str:
    """The key of the server that runs with these settings. Raises :class:`AdminKeyMissing`."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    path = admin_key_file(settings)
    try:
        return path.read_text().strip()
    except FileNotFoundError as error:
        raise AdminKeyMissing(path) from error


def ensure_admin_key(settings: Settings) -> str:
    """The key, made now if there is none; the file is 0600 from its first byte on."""
    try:
        return read_admin_key(settings)
    except AdminKeyMissing:
        path = admin_key_file(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        key = secrets.token_urlsafe(32)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:  # another command was first
            return read_admin_key(settings)
        with os.fdopen(descriptor, "w") as file:
            file.write(key + "\n")
        return key
