"""Keys of the local stack: made once, kept in one file that only this user reads, passed by environment."""

import json
import os
import secrets
from pathlib import Path

from tide_platform.local.layout import Layout

# variable -> how many random bytes; AWS names, because boto3, Lance and MLflow read those themselves
_KEYS = {
    "AWS_ACCESS_KEY_ID": 10,
    "AWS_SECRET_ACCESS_KEY": 30,
    "TIDE_ADMIN_KEY": 32,  # SGLang's admin routes and the plugin's own
    "WEED_JWT_SIGNING_KEY": 32,  # SeaweedFS's volume server takes writes and reads of its own gateway only
    "WEED_JWT_SIGNING_READ_KEY": 32,
}


def load_secrets(layout: Layout) -> dict[str, str]:
    """The stack's keys by variable name; what is missing is made and the file (mode 0600) rewritten."""
    kept = _read(layout.secrets) if layout.secrets.exists() else {}
    missing = {name: secrets.token_hex(size) for name, size in _KEYS.items() if not kept.get(name)}
    if missing:
        kept |= missing
        write_private(layout.secrets, "".join(f"{name}={value}\n" for name, value in kept.items()))
    return {name: kept[name] for name in _KEYS}


def write_identities(layout: Layout, keys: dict[str, str]) -> None:
    """SeaweedFS's list of who may do what: one identity, ours; without it the store would be open to all."""
    credential = {"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}
    identity = {
        "name": "tide",
        "credentials": [credential],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    write_private(layout.identities, json.dumps({"identities": [identity]}))


def write_private(path: Path, text: str) -> None:
    """Write ``text`` whole or not at all, mode 0600 from the first byte."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read(path: Path) -> dict[str, str]:
    lines = (line.partition("=") for line in path.read_text().splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in lines}
