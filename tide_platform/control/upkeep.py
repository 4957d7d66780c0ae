"""One whole pass of upkeep: the dataset (as `tide maintain --once`), and the history of live requests."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.dataset import pinned_versions
from tide_platform.control.ledger import Ledger

POLL_S = 2.0


def maintain_once(
    settings: Settings,
    ledger: Ledger,
    patience_s: float = 120.0,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """What was done, flat: counts of :class:`~tide_platform.store.upkeep.UpkeepCounts`, and the rows that
    thinning saved (``history_rows_saved``). ``dataset``: ``kept up``, or that another process holds the
    lease of the upkeep for longer than ``patience_s``. Raises what the store and the ledger raise.
    """
    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.objects import ObjectStore
    from tide_platform.store.upkeep import Upkeep

    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    upkeep = Upkeep(settings, open_store(settings), objects, partial(pinned_versions, settings))
    end = monotonic() + patience_s
    try:
        while not (held := upkeep.lease.try_hold()) and monotonic() < end:
            sleep(POLL_S)  # `tide ingest` keeps up now and then, and lets the lease run out between
        while held and not upkeep.run(everything=True):
            pass
    finally:
        upkeep.lease.release()
    saved = ledger.history.thin(settings.deployment)
    word = "kept up" if held else "another process keeps it up"
    return {"dataset": word, "history_rows_saved": saved, **upkeep.counts.to_json()}
