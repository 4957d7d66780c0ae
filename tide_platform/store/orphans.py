"""Files that a writer left behind when it died: no version refers to them and no pending entry names them."""

import logging

from tide_platform.store.errors import EntryCorrupt
from tide_platform.store.handle import Handle
from tide_platform.store.objects import ObjectStore
from tide_platform.store.pending import Pending

log = logging.getLogger("tide.maintain")


def remove_orphans(handle: Handle, objects: ObjectStore, deployment: str, before: float) -> tuple[int, int]:
    """Removes data files, and blobs beside them, that were last written before that time; (files, bytes).

    Reads every retained manifest where a candidate is found, and only then. A pending entry that cannot be
    read stops it: its files are not known.
    """
    dataset = handle.require(fresh=True)
    data = f"{handle.name}/data/"
    old = [entry for entry in objects.entries(data) if entry.modified < before]
    named = {_stem(file.path) for each in dataset.get_fragments() for file in each.metadata.files}
    candidates = {_stem(entry.key.removeprefix(data)) for entry in old} - named
    if not candidates:
        return 0, 0
    pending = Pending(objects, deployment)
    try:
        entries = [pending.get(entry_id) for entry_id in pending.ids()]
    except EntryCorrupt as error:
        log.error("%s; orphans are left alone until the committer has set it aside", error)
        return 0, 0
    candidates -= {_stem(name) for entry in entries if entry for name in entry.files()}
    with handle.errors():
        for ref in dataset.version_refs():
            if not candidates:
                break
            version = dataset.checkout_version(ref["version"])
            candidates -= {_stem(f.path) for each in version.get_fragments() for f in each.metadata.files}
    gone = [entry for entry in old if _stem(entry.key.removeprefix(data)) in candidates]
    for entry in gone:
        objects.delete(entry.key)
    if gone:
        log.info("removed %d files of dead writers", len(gone))
    return len(gone), sum(entry.size for entry in gone)


def _stem(name: str) -> str:
    """``x.lance`` and ``x/0.blob`` belong together."""
    return name.partition("/")[0].removesuffix(".lance")
