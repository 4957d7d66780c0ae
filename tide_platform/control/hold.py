"""Signs of life: while a step works, its run's hold on the window is renewed from a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy.exc import OperationalError

from tide_platform.control.ledger import Ledger
from tide_platform.control.records import StaleRun, WindowRecord
from tide_platform.control.states import WindowKey


@dataclass
class Hold:
    """A run's hold on a window, as far as its last renewal knows."""

    ledger: Ledger
    record: WindowRecord  # as it was when the step began
    run_id: str
    lost: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> WindowKey:
        return self.record.key

    def check(self) -> None:
        """Ask the ledger now. Raises :class:`StaleRun` when another attempt goes on with the window."""
        if self.lost.is_set() or not self.ledger.beat(self.key, self.run_id):
            raise StaleRun(self.key, self.run_id, "its hold was given up")


@contextmanager
def hold(ledger: Ledger, key: WindowKey, run_id: str, attempt: int | None, lease_s: float) -> Iterator[Hold]:
    """Claim the window for a run (see :meth:`Ledger.claim`) and keep it until the block ends.

    The hold itself stays with the run afterwards, for its next step.
    """
    held = Hold(ledger, ledger.claim(key, run_id, attempt), run_id)
    ledger.beat(key, run_id)
    stop = threading.Event()
    thread = threading.Thread(target=_renew, args=(held, stop, lease_s / 6), name=f"hold {key}", daemon=True)
    thread.start()
    try:
        yield held
    finally:
        stop.set()
        thread.join()


def _renew(held: Hold, stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        try:
            alive = held.ledger.beat(held.key, held.run_id)
        except OperationalError:
            continue  # a locked or briefly unreachable database: the lease spans several renewals
        if not alive:
            held.lost.set()
            return
