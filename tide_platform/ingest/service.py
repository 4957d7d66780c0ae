"""``tide ingest``: waits for sealed segments, commits them in batches, outlasts a store that is down."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tenacity

from tide_platform.capture.spool import sealed_segments
from tide_platform.config import Settings
from tide_platform.ingest.committer import Committer
from tide_platform.ingest.lease import Lease
from tide_platform.store.errors import StoreUnavailable

log = logging.getLogger("tide.ingest")
STATUS_FILE = "ingest.json"
_SAY_SECONDS = 30.0
_ATTEMPTS_ONCE = 5


class Ingest:
    """Holds the lease of the deployment's spool folder from its making to :meth:`close`."""

    def __init__(self, settings: Settings, stop: threading.Event | None = None):
        from tide_platform.store.hidden_states import open_store  # Lance takes a second
        from tide_platform.store.objects import ObjectStore

        self._folder, self._limits = settings.spool_folder, settings.ingest
        self._lease = Lease(self._folder)
        self._stop = stop or threading.Event()
        self._objects = ObjectStore(settings.storage)
        self._committer = Committer(open_store(settings))
        self._said = 0.0

    @property
    def counts(self) -> dict[str, int]:
        return self._committer.counts.to_json()

    def run(self, once: bool = False) -> None:
        """Until told to stop; ``once``: until no sealed segment is left, and then a store that stays down
        raises :class:`StoreUnavailable`. Other typed errors of the store (keys, conditional puts) are
        raised at once.
        """
        try:
            self._patiently(self._prepare, once)
            while not self._stop.is_set():
                waiting = sealed_segments(self._folder)
                if waiting and (once or self._due(waiting)):
                    batch = self._batch(waiting)
                    self._patiently(lambda paths=batch: self._committer.commit(paths), once)
                    self._write_status()
                elif once:
                    return
                else:
                    self._stop.wait(self._limits.poll_seconds)
        finally:
            self._write_status()
            self._lease.release()

    def _prepare(self) -> None:
        self._objects.ensure_bucket()
        self._objects.probe_conditional_put()

    def _due(self, waiting: list[Path]) -> bool:
        """Enough bytes, or the oldest has waited long enough: a commit costs a version and a fragment for
        ever.
        """
        oldest = time.time() - waiting[0].stat().st_mtime
        return oldest >= self._limits.commit_seconds or sum(_sizes(waiting)) >= self._limits.commit_bytes

    def _batch(self, waiting: list[Path]) -> list[Path]:
        """The oldest segments, up to ``commit_bytes``: what is held in memory at a time."""
        total, batch = 0, []
        for path, size in zip(waiting, _sizes(waiting), strict=True):
            if batch and total + size > self._limits.commit_bytes:
                break
            total += size
            batch.append(path)
        return batch

    def _patiently(self, call: Callable[[], None], once: bool) -> None:
        """Repeats ``call`` with growing pauses while the store is down; segments stay where they are
        meanwhile.
        """
        tries = tenacity.stop_after_attempt(_ATTEMPTS_ONCE) if once else tenacity.stop_never
        try:
            tenacity.Retrying(
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

    def _say(self, state: tenacity.RetryCallState) -> None:
        if self._said and time.monotonic() - self._said < _SAY_SECONDS:
            return
        self._said = time.monotonic()
        error = state.outcome.exception() if state.outcome else None
        waiting = len(sealed_segments(self._folder))
        log.error("%s; %d segments wait, nothing is lost, trying again", error, waiting)

    def _write_status(self) -> None:
        temporary = self._folder / f"{STATUS_FILE}.new"
        temporary.write_text(json.dumps({"at": time.time(), **self.counts}))
        temporary.rename(self._folder / STATUS_FILE)


def _sizes(paths: list[Path]) -> list[int]:
    return [path.stat().st_size for path in paths]
