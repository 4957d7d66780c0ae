"""``tide ingest``: waits for sealed segments, stores them, outlasts a store that is down."""

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tenacity

from tide_platform.capture.folder import write_status
from tide_platform.config import Settings, TideError
from tide_platform.config.locks import LockHeld, locked
from tide_platform.ingest.counts import BEAT_SECONDS, STATUS_FILE, Counts
from tide_platform.ingest.segments import Segments
from tide_platform.ingest.worker import Worker
from tide_platform.store.errors import StoreError, StoreUnavailable
from tide_platform.store.lease import StoreLease
from tide_platform.store.pending import Pending

log = logging.getLogger("tide.ingest")
_SAY_SECONDS = 30.0
_ATTEMPTS_ONCE = 5
_SLICE_SECONDS = 1.0  # of upkeep between two commits


class Ingest:
    """One worker on the deployment's spool folder; there may be several, also on other machines.

    ``pinned`` gives the versions of the dataset that upkeep must leave: those of open windows.
    """

    def __init__(
        self,
        settings: Settings,
        stop: threading.Event | None = None,
        pinned: Callable[[], set[int]] = set,
    ):
        from tide_platform.store.hidden_states import open_store  # Lance takes a second
        from tide_platform.store.objects import ObjectStore
        from tide_platform.store.upkeep import Upkeep

        self._folder, self._limits = settings.spool_folder, settings.ingest
        self._counts = Counts()
        self._segments = Segments(self._folder, settings.ingest, self._counts)
        self._slot, self._slot_lock = _take_slot(self._folder)
        self._stop = stop or threading.Event()
        self._objects = ObjectStore(settings.storage)
        store = open_store(settings)
        self._lease = StoreLease(
            self._objects, f"{settings.deployment}/leases/commit", settings.ingest.lease_seconds
        )
        self._worker = Worker(
            store,
            Pending(self._objects, settings.deployment),
            self._lease,
            self._segments,
            settings.ingest,
            self._counts,
            f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(2)}",
        )
        self._interval = settings.maintain.interval_s
        self._upkeep = Upkeep(settings, store, self._objects, pinned)
        self._kept_up = time.monotonic()
        self._said = 0.0
        self._written = self._unwritten = float("-inf")  # the status file: when, and when it was refused

    @property
    def counts(self) -> dict[str, int]:
        return self._counts.to_json()

    @property
    def status_file(self) -> Path:
        name = STATUS_FILE if self._slot == 0 else f"ingest-{self._slot}.json"
        return self._folder / name

    def run(self, once: bool = False) -> None:
        """Until told to stop; ``once``: until no sealed segment is left that no other worker has claimed,
        and then a store that stays down raises :class:`StoreUnavailable`. Other typed errors of the store
        (keys, conditional puts) are raised at once.
        """
        try:
            self._patiently(self._prepare, once)
            while not self._stop.is_set():
                if self._patiently(lambda: self._worker.step(at_once=once), once):
                    self._write_status()
                elif once and not self._worker.waiting:
                    return
                else:
                    self._stop.wait(self._limits.poll_seconds)
                if not once:
                    self._keep_up()
                    self._beat()
        finally:
            self._write_status()
            self._end()

    def _prepare(self) -> bool:
        self._objects.ensure_bucket()
        self._objects.probe_conditional_put()
        return True

    def _keep_up(self) -> None:
        """A short slice of upkeep, by the worker that commits; its failures never stop ingest."""
        now = time.monotonic()
        if not self._interval or not self._lease.epoch or now - self._kept_up < self._interval:
            return
        try:
            finished = self._upkeep.run(_SLICE_SECONDS)
        except TideError as error:
            log.error("upkeep: %s", error)
            self._upkeep.counts.failures += 1
            finished = True
        if finished:
            self._kept_up = time.monotonic()
        self._write_status()

    def _end(self) -> None:
        """The next worker need not wait for this one's leases to run out."""
        self._worker.close()
        for lease in (self._lease, self._upkeep.lease):
            try:
                lease.release()
            except StoreError as error:
                log.warning("%s", error)
        self._slot_lock.close()

    def _patiently(self, call: Callable[[], bool], once: bool) -> bool:
        """Repeats ``call`` with growing pauses while the store is down; segments stay where they are
        meanwhile.
        """
        tries = tenacity.stop_after_attempt(_ATTEMPTS_ONCE) if once else tenacity.stop_never
        try:
            return tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(StoreUnavailable),
                wait=tenacity.wait_exponential_jitter(multiplier=0.5, max=30.0),
                stop=tenacity.stop_any(tries, tenacity.stop_when_event_set(self._stop)),
                sleep=tenacity.sleep_using_event(self._stop),
                before_sleep=self._say,
                reraise=True,
            )(call)
        except StoreUnavailable:
            if not self._stop.is_set():
                raise
        return False

    def _say(self, state: tenacity.RetryCallState) -> None:
        self._counts.store_failures += 1
        self._write_status()
        if self._said and time.monotonic() - self._said < _SAY_SECONDS:
            return
        self._said = time.monotonic()
        error = state.outcome.exception() if state.outcome else None
        waiting = len(self._segments.waiting())
        log.error("%s; %d segments wait, nothing is lost, trying again", error, waiting)

    def _beat(self) -> None:
        if time.monotonic() - self._written >= BEAT_SECONDS:
            self._write_status()

    def _write_status(self) -> None:
        """A full disk must not end ingest, which empties it."""
        upkeep = self._upkeep.counts.to_json()
        status: dict[str, Any] = {"pid": os.getpid(), "at": time.time(), **self.counts}
        status |= {f"upkeep_{name}": value for name, value in upkeep.items()}
        self._written = time.monotonic()
        try:
            write_status(self.status_file, status)
        except OSError as error:
            if self._written - self._unwritten >= _SAY_SECONDS:
                self._unwritten = self._written
                log.error("%s: %s", self.status_file, error)


def _take_slot(folder: Path) -> tuple[int, contextlib.ExitStack]:
    """A number that no other worker on this folder has, and its lock."""
    lock, slot = contextlib.ExitStack(), 0
    while True:
        try:
            lock.enter_context(locked(folder / f"ingest-{slot}.lock"))
            return slot, lock
        except LockHeld:
            slot += 1
