"""Samples into the deployment's dataset, each exactly once by its id, however often they are given."""

import hashlib
from collections.abc import Sequence

from tide_platform.capture.record import Sample
from tide_platform.store import reading
from tide_platform.store.errors import CommitRaced
from tide_platform.store.hidden_states import HiddenStates


def stored_ids(store: HiddenStates, sample_ids: Sequence[str], version: int | None = None) -> set[str]:
    """Those of ``sample_ids`` that the dataset holds at ``version`` (the newest where None)."""
    if not sample_ids:
        return set()
    where = f"sample_id IN ({reading.quoted(sample_ids)})"
    return {ref.sample_id for ref in store.refs(version=version, where=where)}


def append_new(store: HiddenStates, samples: Sequence[Sample]) -> int:
    """Appends those that the dataset does not hold, in one commit; how many they were.

    Whoever else commits meanwhile, the same samples included, makes this commit conflict, and it is decided
    anew. Raises :class:`StoreUnavailable`: then it is unknown whether the commit took place, and calling
    again settles it.
    """
    ids = [sample.meta.sample_id for sample in samples]
    fragments: list[str] = []
    written: set[str] = set()
    while True:
        snapshot = store.snapshot()
        known = stored_ids(store, ids, snapshot.version if snapshot else None)
        new = {s.meta.sample_id: s for s in samples if s.meta.sample_id not in known}
        if not new or snapshot is None:
            return 0
        if set(new) != written:
            fragments, written = store.write(list(new.values())), set(new)
        try:
            store.commit(fragments, [_batch_id(sorted(new))], snapshot)
            return len(new)
        except CommitRaced:
            continue


def _batch_id(sample_ids: Sequence[str]) -> str:
    return "file-" + hashlib.sha256("\n".join(sample_ids).encode()).hexdigest()[:32]
