"""Which old versions nobody needs."""

from tide_platform.store.durable import manifest_version
from tide_platform.store.errors import VersionGone
from tide_platform.store.handle import Handle
from tide_platform.store.objects import ObjectStore


def removable(
    handle: Handle, objects: ObjectStore, before: float, pinned: set[int], expired: str | None
) -> list[int]:
    """Versions made before that time, but the newest and the pinned; expiry beats pins: a pinned version that
    shows expired rows goes as well, whoever reads the window finds the others in the newest version.
    """
    prefix = f"{handle.name}/_versions/"
    made = {
        version: entry.modified
        for entry in objects.entries(prefix)
        if (version := manifest_version(entry.key.removeprefix(prefix))) is not None
    }
    newest = max(made, default=0)
    return sorted(
        version
        for version, modified in made.items()
        if version != newest
        and modified < before
        and (version not in pinned or (expired is not None and _shows(handle, version, expired)))
    )


def _shows(handle: Handle, version: int, where: str) -> bool:
    try:
        dataset = handle.at(version)
    except VersionGone:
        return False
    with handle.errors():
        return dataset is not None and dataset.count_rows(where) > 0
