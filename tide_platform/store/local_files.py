"""A local folder with the calls of :class:`~tide_platform.store.s3.S3Files`."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tide_platform.store.errors import ObjectMissing, StoreUnavailable


@dataclass(frozen=True)
class Entry:
    """One object of a listing."""

    key: str
    size: int
    modified: float  # Unix time, of the store's clock


class LocalFiles:
    """Files below ``root``; each appears whole or not at all."""

    def __init__(self, root: Path):
        self._root = root

    def ensure_root(self) -> None:
        with self._errors(""):
            self._root.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes, only_if_absent: bool = False) -> bool:
        """``False``: something is there already, and ``only_if_absent`` was asked for."""
        with self._errors(name), self._arriving(name) as temporary:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return self._place(temporary, name, only_if_absent)

    def get(self, name: str) -> bytes:
        with self._errors(name):
            return (self._root / name).read_bytes()

    def upload(self, path: Path, name: str) -> None:
        with self._errors(name), self._arriving(name) as temporary:
            shutil.copyfile(path, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            self._place(temporary, name, only_if_absent=False)

    def download(self, name: str, path: Path) -> None:
        with self._errors(name):
            shutil.copyfile(self._root / name, path)

    def exists(self, name: str) -> bool:
        return (self._root / name).is_file()

    def entries(self, prefix: str) -> list[Entry]:
        """What starts with ``prefix``, as S3 lists it: sorted, whatever the folders."""
        top = self._root / prefix.rpartition("/")[0]
        found = []
        for path in top.rglob("*"):
            name = path.relative_to(self._root).as_posix()
            if not name.startswith(prefix) or name.endswith(".part"):
                continue
            try:
                stat = path.stat()
            except FileNotFoundError:  # gone since
                continue
            if not path.is_dir():
                found.append(Entry(name, stat.st_size, stat.st_mtime))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    @contextmanager
    def _arriving(self, name: str) -> Iterator[Path]:
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _place(self, temporary: Path, name: str, only_if_absent: bool) -> bool:
        if not only_if_absent:
            temporary.rename(self._root / name)
            return True
        try:
            (self._root / name).hardlink_to(temporary)  # fails where the name is taken, unlike a rename
        except FileExistsError:
            return False
        return True

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectMissing(str(self._root / name)) from error
        except OSError as error:
            raise StoreUnavailable(str(self._root / name), error.strerror or str(error)) from error
