"""A newest version that cannot be read, as a power cut leaves it (an unsynced manifest is found empty): set
aside, never deleted, and said.
"""

import json
import time
from dataclasses import dataclass

import lance

from tide_platform.store.durable import manifest_name, manifest_version
from tide_platform.store.errors import ManifestDamaged
from tide_platform.store.handle import Handle
from tide_platform.store.objects import ObjectStore

ASIDE = "set-aside"


@dataclass(frozen=True)
class Recovered:
    """What was done; ``rows``: of files that only the lost versions named, at most."""

    uri: str
    lost: list[int]  # versions
    now: int  # the version that is newest now
    rows: int
    aside: str  # key of the report

    def __str__(self) -> str:
        return (
            f"{self.uri}: version {', '.join(map(str, self.lost))} could not be read and is set aside "
            f"({self.aside}); version {self.now} is the newest now; at most {self.rows} samples are lost, "
            "those still in the spool are stored again"
        )


def recover_manifest(handle: Handle) -> Recovered:
    """Sets newest manifests aside until one is readable. Raises :class:`ManifestDamaged` where none is."""
    objects = ObjectStore(handle.location.storage)
    versions_key = f"{handle.name}/_versions"
    names = [key.rpartition("/")[2] for key in objects.list(f"{versions_key}/")]
    found = sorted((v for v in map(manifest_version, names) if v is not None), reverse=True)
    lost: list[int] = []
    for version in found:
        try:
            with handle.errors(opening=True):
                dataset = handle.open(version)
        except ManifestDamaged:
            lost.append(version)
            continue
        break
    else:
        raise ManifestDamaged(handle.uri, "no version of it is readable")
    rows = _unreferenced_rows(handle, objects, dataset)
    folder = f"{handle.name.rpartition('/')[0]}/{ASIDE}/{time.time_ns()}"
    report = Recovered(handle.uri, lost, dataset.version, rows, f"{folder}/report.json")
    objects.put_bytes(report.aside, json.dumps(report.__dict__, indent=1).encode())
    for version in lost:
        key = f"{versions_key}/{manifest_name(version)}"
        objects.put_bytes(f"{folder}/{manifest_name(version)}", objects.get_bytes(key))
        objects.delete(key)
    handle.forget()
    return report


def _unreferenced_rows(handle: Handle, objects: ObjectStore, dataset: lance.LanceDataset) -> int:
    """Rows of readable data files that the version does not name and that are younger than it."""
    from lance.file import LanceFileReader

    named = {file.path for each in dataset.get_fragments() for file in each.metadata.files}
    manifest = f"{handle.name}/_versions/{manifest_name(dataset.version)}"
    since = next(entry.modified for entry in objects.entries(manifest))
    rows = 0
    for entry in objects.entries(f"{handle.name}/data/"):
        name = entry.key.removeprefix(f"{handle.name}/data/")
        if not name.endswith(".lance") or name in named or entry.modified < since:
            continue
        try:
            reader = LanceFileReader(f"{handle.uri}/data/{name}", storage_options=handle.options)
            rows += reader.metadata().num_rows
        except (OSError, ValueError):
            continue  # torn as well
    return rows
