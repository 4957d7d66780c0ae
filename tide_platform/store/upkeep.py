"""Upkeep of the dataset (``tide maintain``): expiry, compaction, index, old versions, orphans, space.

In short steps under a lease of its own. Nothing here can harm a live appender: every step is a Lance commit
that conflicts where it must, compaction leaves out the fragment that appends touch
(:mod:`tide_platform.store.commits`), and files are removed only when nothing refers to them.
Times are the store's, read from an object written for it: a machine whose clock is wrong expires nothing.
"""

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tide_platform.config import Settings
from tide_platform.store.compaction import Compactor
from tide_platform.store.errors import CommitRaced, ManifestDamaged, StoreUnavailable
from tide_platform.store.expiry import expired_where
from tide_platform.store.handle import TIME_INDEX
from tide_platform.store.hidden_states import HiddenStates
from tide_platform.store.lease import StoreLease
from tide_platform.store.objects import ObjectStore
from tide_platform.store.orphans import remove_orphans
from tide_platform.store.recovery import recover_manifest
from tide_platform.store.versions import removable

log = logging.getLogger("tide.maintain")
LEASE_SECONDS = 30.0
_UNINDEXED = 16  # fragments
_VERSIONS = 128  # old ones, before a clean-up is worth its reads
_PAUSE = 600.0  # seconds between two vacuums


@dataclass
class UpkeepCounts:
    """Since this process started."""

    expired_samples: int = 0
    compactions: int = 0
    fragments_merged: int = 0
    versions_removed: int = 0
    bytes_removed: int = 0
    orphans_removed: int = 0
    recovered: int = 0  # damaged newest versions set aside
    conflicts: int = 0  # steps that an append preceded; they are tried again
    vacuums: int = 0
    failures: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class Upkeep:
    """``pinned``: versions of open windows; ``now``: Unix time, None: the store's."""

    def __init__(
        self,
        settings: Settings,
        store: HiddenStates,
        objects: ObjectStore,
        pinned: Callable[[], set[int]] = set,
        now: Callable[[], float] | None = None,
    ):
        self.counts = UpkeepCounts()
        self.lease = StoreLease(objects, f"{settings.deployment}/leases/maintain", LEASE_SECONDS)
        self._settings, self._store, self._objects, self._pinned = settings, store, objects, pinned
        self._now = now or self._store_time
        self._compactor = Compactor(store.handle, settings.maintain.max_fragments)
        self._steps: list[Callable[[bool], bool]] = []
        self._all = False
        self._orphans_at = self._vacuum_at = float("-inf")
        self._freed = 0

    def run(self, seconds: float = float("inf"), everything: bool = False) -> bool:
        """Steps for so long; whether a whole pass is done. A pass that was cut goes on with the next call.

        ``everything``: also what is only worth its cost now and then. Without the lease (another process
        keeps up) nothing is done. Raises :class:`StoreUnavailable`.
        """
        if not self.lease.try_hold():
            return True
        end = time.monotonic() + seconds
        if not self._steps:
            self._all = everything
            self._steps = [self._expire, self._index, self._compact, self._clean, self._orphans, self._vacuum]
            if not self._recover():
                self._steps = []
        while self._steps:
            try:
                again = self._steps[0](self._all)
            except CommitRaced as error:
                log.info("%s", error)
                self.counts.conflicts += 1
                again = False
            if not again:
                self._steps.pop(0)
            if time.monotonic() >= end or not self.lease.try_hold():
                if again:  # commits that come quicker than merges must not starve what comes after
                    step = self._steps.pop(0)
                    if self._steps:  # alone it waits for the next pass
                        self._steps.append(step)
                break
        return not self._steps

    def _recover(self) -> bool:
        """Whether there is a dataset to keep up."""
        try:
            return self._store.handle.latest() is not None
        except ManifestDamaged:
            report = recover_manifest(self._store.handle)
            self.counts.recovered += len(report.lost)
            log.error("%s", report)
            return True

    def _expire(self, everything: bool) -> bool:
        where = expired_where(self._settings.retention, self._now())
        if where is None:
            return False
        handle = self._store.handle
        with handle.errors():
            dataset = handle.require(fresh=True)
            rows = dataset.count_rows(where)
            if rows:
                dataset.delete(where)  # drops fragments of which no row is left whole
                self.counts.expired_samples += rows
                log.info("%d samples expired", rows)
        return False

    def _compact(self, everything: bool) -> bool:
        merged = self._compactor.step(self._now())
        self.counts.compactions += bool(merged)
        self.counts.fragments_merged += merged
        return merged > 0

    def _index(self, everything: bool) -> bool:
        handle = self._store.handle
        with handle.errors():
            dataset = handle.require(fresh=True)
            names = [index.name for index in dataset.describe_indices()]
            if TIME_INDEX not in names:  # its maker died between the two
                dataset.create_scalar_index("captured_at", "BTREE", name=TIME_INDEX)
            elif dataset.stats.index_stats(TIME_INDEX)["num_unindexed_fragments"] >= _UNINDEXED:
                dataset.optimize.optimize_indices(index_names=[TIME_INDEX])
        return False

    def _clean(self, everything: bool) -> bool:
        where = expired_where(self._settings.retention, self._now())
        keep = 3600 * self._settings.maintain.keep_hours
        handle = self._store.handle
        old = removable(handle, self._objects, self._now() - keep, self._pinned(), where)
        if len(old) < (1 if everything else _VERSIONS):
            return False
        with handle.errors():
            dataset = handle.require(fresh=True)
            stats = dataset.cleanup_old_versions(versions=old, error_if_tagged_old_versions=False)
        self.counts.versions_removed += stats.old_versions
        self.counts.bytes_removed += stats.bytes_removed
        self._freed += stats.bytes_removed
        return False

    def _orphans(self, everything: bool) -> bool:
        hours = self._settings.maintain.orphan_hours
        if not everything and time.monotonic() - self._orphans_at < hours * 900:
            return False
        self._orphans_at = time.monotonic()
        handle = self._store.handle
        before = self._now() - 3600 * hours
        count, size = remove_orphans(handle, self._objects, self._settings.deployment, before)
        self.counts.orphans_removed += count
        self.counts.bytes_removed += size
        self._freed += size
        return False

    def _vacuum(self, everything: bool) -> bool:
        """SeaweedFS frees deleted bytes only then."""
        url = self._settings.maintain.vacuum_url
        if not url or not self._freed or (not everything and time.monotonic() - self._vacuum_at < _PAUSE):
            return False
        self._vacuum_at = time.monotonic()
        try:
            with urllib.request.urlopen(f"{url}/vol/vacuum?garbageThreshold=0.05", timeout=120):
                self.counts.vacuums += 1
                self._freed = 0
        except (urllib.error.URLError, TimeoutError) as error:
            raise StoreUnavailable(url, str(error)) from error
        return False

    def _store_time(self) -> float:
        key = f"{self._settings.deployment}/leases/now"
        self._objects.put_bytes(key, b"")
        return next(entry.modified for entry in self._objects.entries(key) if entry.key == key)
