"""The dataset as windows see it: its tip, new rows, and a window's samples."""

import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from tide_platform.config import Settings
from tide_platform.control.ledger import WindowRecord
from tide_platform.control.windows import REFERENCE_TENANT, Division, Ref, divide

if TYPE_CHECKING:
    from tide_platform.store.hidden_states import HiddenStates

_lock = threading.Lock()  # one thread at a time uses the store's handle


@cache
def _opened(settings_json: str) -> "HiddenStates":
    from tide_platform.store.hidden_states import open_store

    return open_store(Settings.model_validate_json(settings_json))


class Dataset:
    """Implements :class:`tide_platform.control.reconcile.Store`.

    The handle stays open between ticks of a process: opening it anew costs several reads of the object store.
    """

    def __init__(self, settings: Settings):
        self._settings = settings

    def tip(self) -> tuple[int, int]:
        with _lock:
            tip = self._store().tip()
        return tip.version, tip.rows

    def after(self, row_id: int, version: int) -> list[Ref]:
        with _lock:
            return list(self._store().refs(version, f"_rowid > {row_id}" if row_id >= 0 else None))

    def _store(self) -> "HiddenStates":
        fields = {"deployment": self._settings.deployment, "storage": self._settings.storage}
        return _opened(Settings(**fields).model_dump_json())


@dataclass(frozen=True)
class WindowData:
    """A window's samples and the reference set, divided."""

    division: Division
    version: int  # of the dataset, at which all of them are found
    lost: int  # samples that expired since the window was cut


def read_window(settings: Settings, record: WindowRecord) -> WindowData:
    """The data of a window, at the version that it was cut at.

    Where the reference set was captured only later, the newest version serves: row ids stay the same.
    Raises :class:`NoReference`, and what the store raises.
    """
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    own = f"_rowid > {record.after_row} AND " if record.after_row >= 0 else ""
    where = f"({own}_rowid <= {record.last_row}) OR tenant = '{REFERENCE_TENANT}'"
    for version in (record.lance_version, store.tip().version):
        refs = store.refs(version, where)
        samples = [ref for ref in refs if ref.tenant != REFERENCE_TENANT]
        reference = [ref for ref in refs if ref.tenant == REFERENCE_TENANT]
        if reference:
            break
    division = divide(record.key.deployment, samples, reference, settings.window.validation_share)
    return WindowData(division, version, record.samples - len(samples))
