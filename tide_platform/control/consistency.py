"""A window's challenger before it is judged: is what was trained what would be served?"""

from typing import TYPE_CHECKING

from tide_platform.config import Settings
from tide_platform.control.champion import fetch_draft
from tide_platform.control.ledger import Ledger
from tide_platform.control.states import NotTrained, WindowKey

if TYPE_CHECKING:
    from tide_platform.gate.report import GateReport


def check_challenger(settings: Settings, ledger: Ledger, key: WindowKey) -> "GateReport":
    """The consistency gate on the window's checkpoint, as the object store gives it back, against the draft
    that it was trained from: what its files tell, and with ``gate.own_server`` all of `tide gate`.

    Raises :class:`NotTrained`, :class:`DraftNotStored`, and what
    :func:`tide_platform.gate.run.run_gate` does.
    """
    from tide_platform.gate.run import run_gate

    record = ledger.get(key)
    if record.challenger is None:
        raise NotTrained(key)
    folder = fetch_draft(settings, record.challenger)
    parent = fetch_draft(settings, record.parent) if record.parent else None
    return run_gate(settings, folder, parent=parent, own_server=settings.gate.own_server)
