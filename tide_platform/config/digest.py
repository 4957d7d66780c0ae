"""Names by content: a draft and a target are known by the digest of what they hold."""

import hashlib
import json
from pathlib import Path

from tide_platform.config.errors import TideError

DIGEST_CHARS = 16
_EDGE = 1 << 20


class FolderIncomplete(TideError):
    """A model folder lacks a file that it must have."""

    def __init__(self, folder: Path, missing: str):
        super().__init__(f"{folder}: no {missing} there; a model folder holds config.json and *.safetensors")
        self.folder, self.missing = folder, missing


def draft_digest(folder: Path) -> str:
    """Digest of a draft folder: ``config.json`` (keys sorted) and every byte of ``model.safetensors``.

    ``tide.json`` is left out: provenance may grow after the weights are final.
    Returns the first 16 hexadecimal digits of a SHA-256. Raises :class:`FolderIncomplete`.
    """
    config, weights = folder / "config.json", folder / "model.safetensors"
    for path in (config, weights):
        if not path.is_file():
            raise FolderIncomplete(folder, path.name)
    digest = hashlib.sha256(json.dumps(json.loads(config.read_text()), sort_keys=True).encode())
    with weights.open("rb") as file:
        while block := file.read(8 * _EDGE):
            digest.update(block)
    return digest.hexdigest()[:DIGEST_CHARS]


def target_digest(folder: Path) -> str:
    """Digest of a target folder, cheap for any size: config, tokenizer, and of each ``*.safetensors`` file
    its name, size, first and last MiB (the header with every tensor's name and shape is in the first).

    Returns the first 16 hexadecimal digits of a SHA-256. Raises :class:`FolderIncomplete`.
    """
    digest = hashlib.sha256()
    shards = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file():
        raise FolderIncomplete(folder, "config.json")
    if not shards:
        raise FolderIncomplete(folder, "*.safetensors")
    digest.update(json.dumps(json.loads((folder / "config.json").read_text()), sort_keys=True).encode())
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for shard in shards:
        size = shard.stat().st_size
        digest.update(f"{shard.name}:{size}".encode())
        with shard.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            digest.update(file.read())
    return digest.hexdigest()[:DIGEST_CHARS]
