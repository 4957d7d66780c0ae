"""The dataset as windows see it: its tip, new rows, a window's samples, and those of windows before it."""

import math
import random
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from tide_platform.config import Settings
from tide_platform.control.database import LedgerUnreachable
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import WindowRecord
from tide_platform.control.windows import (
    REFERENCE_JUDGE_SHARE,
    REFERENCE_TENANT,
    VALIDATION,
    Division,
    NoReference,
    Ref,
    divide,
    halve,
)

if TYPE_CHECKING:
    from tide_platform.store.hidden_states import HiddenStates


PAST_WINDOWS = 16  # that a run draws from; read by range, so a long history costs no more
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


def pinned_versions(settings: Settings) -> set[int]:
    """Versions of the dataset that open windows were cut at; upkeep leaves them to their readers.

    Raises :class:`LedgerUnreachable`.
    """
    try:
        ledger = Ledger(settings.ledger.url)
        try:
            return {record.lance_version for record in ledger.open(settings.deployment)}
        finally:
            ledger.close()
    except (SQLAlchemyError, OSError) as error:
        raise LedgerUnreachable(settings.ledger.url, error) from error


@dataclass(frozen=True)
class WindowData:
    """A window's samples and the reference set, divided."""

    division: Division
    version: int  # of the dataset, at which all of them are found
    lost: int  # samples that expired since the window was cut


def read_window(settings: Settings, record: WindowRecord) -> WindowData:
    """The data of a window, at the version that it was cut at.

    Where that version is gone, or the reference set was captured only later, the newest serves: row ids stay
    the same.
    Raises :class:`NoReference`, and what the store raises.
    """
    from tide_platform.store.errors import VersionGone
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    newest = store.tip().version
    where = f"{_rows_of(record)} OR tenant = '{REFERENCE_TENANT}'"
    for version in (record.lance_version, newest):
        try:
            refs = store.refs(version, where)
        except VersionGone:  # upkeep; of a window that is not open any more, or whose samples expired
            refs = store.refs(version := newest, where)
        samples = [ref for ref in refs if ref.tenant != REFERENCE_TENANT]
        reference = [ref for ref in refs if ref.tenant == REFERENCE_TENANT]
        if reference:
            break
    division = divide(record.key.deployment, samples, reference, settings.window.validation_share)
    return WindowData(division, version, record.samples - len(samples))


@dataclass(frozen=True)
class ReferenceData:
    """The reference set as it is now. ``judge``: kept from training in every window; ``others``: the rest."""

    version: int
    judge: list[str]
    others: list[str]


def read_reference(settings: Settings) -> ReferenceData:
    """The reference set at the newest version. Raises :class:`NoReference`, and what the store raises."""
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    version = store.tip().version
    refs = store.refs(version, f"tenant = '{REFERENCE_TENANT}'") if version else []
    judge, others = halve(refs, REFERENCE_JUDGE_SHARE, REFERENCE_TENANT)
    if not judge:
        raise NoReference(settings.deployment, len(refs))
    return ReferenceData(version, [ref.sample_id for ref in judge], [ref.sample_id for ref in others])


@dataclass(frozen=True)
class PastData:
    """Samples of earlier windows that a run may replay."""

    train: list[str]
    windows: list[str]  # that they were drawn from
    lost: int  # samples of these windows that expired since


def read_past(settings: Settings, ledger: Ledger, record: WindowRecord, data: WindowData) -> PastData:
    """As many training samples of earlier windows as all epochs of a run on ``record`` can take
    (``training.past_window_ratio``), drawn by the seed, at the version of the window's own ``data``.

    A sample that was kept for validation in its window is never among them. Raises what the store raises.
    """
    from tide_platform.store.hidden_states import open_store

    training = settings.training
    wanted = math.ceil(training.past_window_ratio * len(data.division.train)) * training.epochs
    earlier = [past for past in ledger.windows(settings.deployment) if past.last_row <= record.after_row]
    if not wanted or not earlier:
        return PastData([], [], 0)
    draw = random.Random(f"{record.key}:{training.seed}")
    chosen = sorted(draw.sample(earlier, min(PAST_WINDOWS, len(earlier))), key=lambda past: past.key.window)
    ranges = " OR ".join(_rows_of(past) for past in chosen)
    refs = open_store(settings).refs(data.version, f"({ranges}) AND tenant != '{REFERENCE_TENANT}'")
    train: list[str] = []
    lost = 0
    for past in chosen:
        own = [ref for ref in refs if past.after_row < ref.row_id <= past.last_row]
        lost += past.samples - len(own)
        _, of_window = halve(own, settings.window.validation_share, VALIDATION)
        train += [ref.sample_id for ref in of_window]
    return PastData(
        sorted(draw.sample(train, min(wanted, len(train)))), [past.key.window for past in chosen], lost
    )


def _rows_of(record: WindowRecord) -> str:
    """SQL: the window's range of row ids, which are unsigned."""
    after = f"_rowid > {record.after_row} AND " if record.after_row >= 0 else ""
    return f"({after}_rowid <= {record.last_row})"
