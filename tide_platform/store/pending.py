"""Fragments that wait for the committer: one entry (JSON with its crc32c) a batch, beside the dataset."""

import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c

from tide_platform.capture.record import StreamMeta
from tide_platform.store.errors import EntryCorrupt, ObjectMissing
from tide_platform.store.objects import ObjectStore

FOLDER, ASIDE = "pending", "set-aside"


@dataclass(frozen=True)
class Entry:
    """A batch: written, not committed."""

    entry_id: str  # sorts by time of writing
    worker: str
    stream: StreamMeta
    segments: list[str]
    samples: dict[str, float]  # sample id -> captured_at
    fragments: list[str] = field(repr=False)  # JSON, one a tenant and day

    @classmethod
    def of(
        cls,
        worker: str,
        stream: StreamMeta,
        segments: Iterable[str],
        samples: dict[str, float],
        fragments: list[str],
    ) -> "Entry":
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        return cls(name, worker, stream, list(segments), samples, fragments)

    @property
    def oldest(self) -> float:
        return min(self.samples.values())

    def files(self) -> list[str]:
        """Names of its data files, below the dataset's ``data``."""
        return [file["path"] for each in self.fragments for file in json.loads(each)["files"]]


class Pending:
    """The entries of one deployment."""

    def __init__(self, objects: ObjectStore, deployment: str):
        self._objects, self._deployment = objects, deployment

    def put(self, entry: Entry) -> None:
        body = json.dumps(asdict(entry) | {"stream": entry.stream.to_json()}).encode()
        crc = f"{google_crc32c.value(body):08x}".encode()
        self._objects.put_bytes(self._key(entry.entry_id), crc + b"\n" + body)

    def ids(self) -> list[str]:
        """Oldest first."""
        names = [key.rpartition("/")[2] for key in self._objects.list(f"{self._deployment}/{FOLDER}/")]
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def get(self, entry_id: str) -> Entry | None:
        """None: it is gone. Raises :class:`EntryCorrupt`."""
        key = self._key(entry_id)
        try:
            crc, _, body = self._objects.get_bytes(key).partition(b"\n")
        except ObjectMissing:
            return None
        if crc != f"{google_crc32c.value(body):08x}".encode():
            raise EntryCorrupt(self._objects.uri(key), "wrong checksum")
        raw: dict[str, Any] = json.loads(body)
        try:
            return Entry(**{**raw, "stream": StreamMeta.from_json(raw["stream"])})
        except (KeyError, TypeError) as error:
            raise EntryCorrupt(self._objects.uri(key), f"of another release ({error})") from error

    def exists(self, entry_id: str) -> bool:
        return self._objects.exists(self._key(entry_id))

    def delete(self, entry_id: str) -> None:
        self._objects.delete(self._key(entry_id))

    def set_aside(self, entry_id: str) -> str:
        """Keeps its bytes out of the way; returns where."""
        aside = f"{self._deployment}/{ASIDE}/{entry_id}.json"
        try:
            self._objects.put_bytes(aside, self._objects.get_bytes(self._key(entry_id)))
        except ObjectMissing:  # another committer was faster
            return aside
        self.delete(entry_id)
        return aside

    def _key(self, entry_id: str) -> str:
        return f"{self._deployment}/{FOLDER}/{entry_id}.json"
