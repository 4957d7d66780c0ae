"""Files that are there whole or not at all, whatever dies."""

import json
import os
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """A file or a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Writes beside, syncs and renames; a reader sees the former file or this one. Makes the folder. Raises
    ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    work.write_text(json.dumps(value, indent=indent) + "\n", encoding="utf-8")
    sync(work)
    work.replace(path)
    sync(path.parent)
