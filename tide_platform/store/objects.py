"""Files and folders in the object storage: checkpoints and other artefacts, each with its SHA-256."""

import hashlib
import json
import secrets
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tide_platform.config.schema import Storage
from tide_platform.store.errors import ConditionalPutIgnored, ObjectCorrupt, ObjectMissing, StoreUnavailable
from tide_platform.store.local_files import Entry, LocalFiles
from tide_platform.store.location import Location

# written last: a folder without it was not stored whole
INVENTORY = "tide-files.json"
_RACERS = 8
_PROBES = 3


class ObjectStore:
    """Below ``storage.uri``, on S3 or in a local folder; keys are relative to it."""

    def __init__(self, storage: Storage):
        self._location = Location.of(storage)
        if self._location.bucket is None:
            self._files = LocalFiles(Path(self._location.prefix))
        else:
            from tide_platform.store.s3 import S3Files  # boto3 takes half a second

            self._files = S3Files(self._location)

    def uri(self, key: str) -> str:
        return self._location.uri(key)

    def ensure_bucket(self) -> None:
        """Makes the bucket, or the folder, where it is missing."""
        self._files.ensure_root()

    def put_bytes(self, key: str, data: bytes, only_if_absent: bool = False) -> bool:
        """``False``: the key is taken, and ``only_if_absent`` was asked for."""
        return self._files.put(key, data, only_if_absent)

    def get_bytes(self, key: str) -> bytes:
        """Raises :class:`ObjectMissing`."""
        return self._files.get(key)

    def exists(self, key: str) -> bool:
        """Whether there is such an object, or a folder that was stored whole."""
        return self._files.exists(key) or self._files.exists(_inventory(key))

    def entries(self, prefix: str = "") -> list[Entry]:
        """Keys that start with ``prefix`` with their sizes and ages, sorted."""
        return self._files.entries(prefix)

    def list(self, prefix: str = "") -> list[str]:
        """Keys that start with ``prefix``, sorted."""
        return [entry.key for entry in self._files.entries(prefix)]

    def delete(self, key: str) -> None:
        """No error where there is none."""
        self._files.delete(key)

    def upload(self, path: Path, key: str) -> None:
        """One file; a large one in several parts at a time."""
        self._files.upload(path, key)

    def put_folder(self, folder: Path, key: str) -> dict[str, str]:
        """Stores every file below ``folder``; returns their SHA-256 by relative path."""
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        sums = {name: sha256_of(folder / name) for name in names}
        for name in names:
            self._files.upload(folder / name, f"{key.rstrip('/')}/{name}")
        self._files.put(_inventory(key), json.dumps(sums, indent=1).encode())
        return sums

    def get_folder(self, key: str, folder: Path) -> dict[str, str]:
        """Fetches what :meth:`put_folder` stored; ``folder`` appears whole and verified, or not at all.

        One that is there already is verified only. Raises :class:`ObjectMissing`, :class:`ObjectCorrupt`.
        """
        sums: dict[str, str] = json.loads(self._files.get(_inventory(key)))
        if folder.exists():
            self._verify(folder, sums)
            return sums
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for name in sums:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                self._files.download(f"{key.rstrip('/')}/{name}", temporary / name)
            self._verify(temporary, sums)
            temporary.chmod(0o755)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return sums

    def probe_conditional_put(self) -> None:
        """Two conditional puts in a row, then several at once: exactly one of each may win.

        A put that nobody wins says nothing: its answer was lost, and the client's own retry refused. Raises
        :class:`ConditionalPutIgnored`; :class:`StoreUnavailable` where it stays unclear.
        """
        for _ in range(_PROBES):
            key = f".tide-probe/{secrets.token_hex(8)}"
            try:
                twice = sum(self._files.put(key, number, only_if_absent=True) for number in (b"1", b"2"))
                at_once = self._race(f"{key}-race")
            finally:
                self._files.delete(key)
                self._files.delete(f"{key}-race")
            if max(twice, at_once) > 1:
                raise ConditionalPutIgnored(self._location.uri(""))
            if twice == at_once == 1:
                return
        raise StoreUnavailable(self._location.uri(""), "answers to conditional puts were lost")

    def _race(self, key: str) -> int:
        barrier = threading.Barrier(_RACERS)

        def put(number: int) -> bool:
            barrier.wait()
            return self._files.put(key, str(number).encode() * 5000, only_if_absent=True)

        with ThreadPoolExecutor(_RACERS) as pool:
            return sum(pool.map(put, range(_RACERS)))

    def _verify(self, folder: Path, sums: dict[str, str]) -> None:
        for name, expected in sums.items():
            if not (folder / name).is_file():
                raise ObjectMissing(str(folder / name))
            if (found := sha256_of(folder / name)) != expected:
                raise ObjectCorrupt(str(folder / name), expected, found)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inventory(key: str) -> str:
    return f"{key.rstrip('/')}/{INVENTORY}"
