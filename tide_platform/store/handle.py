"""The open Lance dataset: kept between calls, brought to its newest version, errors turned into ours."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lance
from lance.commit import CommitConflictError

from tide_platform.store.errors import CommitRaced, ManifestDamaged, NoDataset, StoreUnavailable, VersionGone
from tide_platform.store.location import Location

TIME_INDEX = "captured_at_idx"
# unbounded, the caches of a process that appends grow by 0.4 MB a commit
_METADATA_CACHE, _INDEX_CACHE = 64 << 20, 8 << 20
# what Lance says of a manifest that is empty or cut
_DAMAGED = ("object of size 0 bytes", "file size is too small", "Invalid protobuf", "magic")


class Handle:
    """One dataset on S3 or in a folder. One thread at a time uses what it hands out."""

    def __init__(self, location: Location, name: str):
        self.name, self.location = name, location
        self.uri = location.uri(name)
        self.folder = None if location.bucket else Path(self.uri)
        self.options = location.lance_options()
        self.session = lance.Session(  # pyright: ignore[reportPrivateImportUsage]
            metadata_cache_size_bytes=_METADATA_CACHE, index_cache_size_bytes=_INDEX_CACHE
        )
        self._dataset: lance.LanceDataset | None = None
        self._lock = threading.Lock()

    def latest(self, fresh: bool = False) -> lance.LanceDataset | None:
        """The newest version; None where there is no dataset yet. What was handed out before stays at its
        version. ``fresh`` opens it anew. Raises :class:`StoreUnavailable`, :class:`ManifestDamaged`.
        """
        with self._lock:
            try:
                with self.errors(opening=True):
                    if self._dataset is None or fresh:
                        self._dataset = self.open()
                    # never checkout_latest(): it would move snapshots that commits are prepared on
                    elif (newest := self._dataset.latest_version) != self._dataset.version:
                        self._dataset = self._dataset.checkout_version(newest)
            except StoreUnavailable as error:
                self._dataset = None
                if "was not found" not in error.what:
                    raise
            except BaseException:
                self._dataset = None
                raise
            return self._dataset

    def open(self, version: int | None = None) -> lance.LanceDataset:
        return lance.dataset(self.uri, version=version, storage_options=self.options, session=self.session)

    def require(self, fresh: bool = False) -> lance.LanceDataset:
        """Raises :class:`NoDataset` too."""
        dataset = self.latest(fresh)
        if dataset is None:
            raise NoDataset(self.uri)
        return dataset

    def at(self, version: int | None) -> lance.LanceDataset | None:
        """A version, the newest where None. Raises :class:`VersionGone` too."""
        dataset = self.latest()
        if dataset is None or version is None:
            return dataset
        try:
            with self.errors():
                return dataset.checkout_version(version)
        except StoreUnavailable as error:
            if "not found" in error.what.lower() or "does not exist" in error.what.lower():
                raise VersionGone(self.uri, version) from error
            raise

    def keep(self, dataset: lance.LanceDataset) -> None:
        """A newer version that a commit returned."""
        with self._lock:
            self._dataset = dataset

    def forget(self) -> None:
        with self._lock:
            self._dataset = None

    @contextmanager
    def errors(self, opening: bool = False) -> Iterator[None]:
        """``opening``: only a manifest is read, so that garbage means a damaged one."""
        try:
            yield
        except CommitConflictError as error:
            version = self._dataset.version if self._dataset else 0
            raise CommitRaced(self.uri, version, _short(error)) from error
        except (OSError, ValueError, RuntimeError) as error:
            text = _short(error)
            if opening and any(sign in text for sign in _DAMAGED):
                raise ManifestDamaged(self.uri, text[:120]) from error
            raise StoreUnavailable(self.uri, text) from error
        except BaseException as error:
            # Lance's Rust code panics over some damaged bytes; that exception has no importable class
            if type(error).__name__ != "PanicException":
                raise
            damaged = ManifestDamaged if opening else StoreUnavailable
            raise damaged(self.uri, _short(error)[:120]) from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
