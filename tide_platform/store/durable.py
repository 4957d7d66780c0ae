"""Makes a local Lance dataset outlive a power cut: Lance writes its files but syncs none of them."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tide_platform.config.files import sync

_SYNCED: dict[Path, float] = {}
_NEWEST = (1 << 64) - 1  # manifests are named by what is left to it, so that the newest sorts first


def manifest_name(version: int) -> str:
    return f"{_NEWEST - version:020d}.manifest"


def manifest_version(name: str) -> int | None:
    """The version of a manifest's name; None where it is no manifest's."""
    stem, dot, suffix = name.rpartition(".")
    return _NEWEST - int(stem) if dot and suffix == "manifest" and stem.isdecimal() else None


def sync_fragments(dataset: Path, files: Iterable[str]) -> None:
    """Data files (names below ``data``) with the blobs beside them. An unsynced file is found empty after a
    power cut.
    """
    data = dataset / "data"
    for name in files:
        path = data / name
        blobs = path.with_suffix("")
        if blobs.is_dir():
            for blob in blobs.iterdir():
                _sync(blob)
            _sync(blobs)
        _sync(path)
    _sync(data)


def sync_commit(dataset: Path, version: int, read_version: int, uuid: str) -> None:
    """The manifest of a version, its transaction and their folders. Of the transaction both names are tried
    that Lance may give it, after the version that it was prepared on or the one that it was rebased on:
    thousands lie there, too many to look through at each commit.
    """
    transactions = dataset / "_transactions"
    for base in {read_version, version - 1}:
        _sync(transactions / f"{base}-{uuid}.txn")
    _sync(transactions)
    _sync(dataset / "_versions" / manifest_name(version))
    _sync(dataset / "_versions")


def sync_new_files(dataset: Path) -> int:
    """Syncs every file of the dataset that changed since the last call in this process, and their folders.

    Returns how many files that were; for upkeep, whose files are many and not known by name.
    """
    since, newest, count = _SYNCED.get(dataset, 0.0), 0.0, 0
    for folder, _, names in os.walk(dataset):
        changed = [path for name in names if _modified(path := Path(folder) / name) >= since]
        for path in changed:
            newest = max(newest, _modified(path))
            _sync(path)
        if changed:
            _sync(Path(folder))
        count += len(changed)
    _SYNCED[dataset] = max(newest, since)
    return count


def _modified(path: Path) -> float:
    """-1 for a file that is gone: upkeep runs at the same time."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -1.0


def _sync(path: Path) -> None:
    with suppress(FileNotFoundError):  # removed by upkeep: nothing needs it
        sync(path)
