"""The durable feature store: the Lance dataset. A generation is the row id of a put."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

from tide_platform.capture.record import Sample
from tide_platform.store import reading
from tide_platform.store import schema as columns
from tide_platform.store.commits import segments_of
from tide_platform.store.errors import (
    BudgetExceeded,
    SampleReleased,
    SamplesMissing,
    StaleGeneration,
    StoreError,
)
from tide_platform.store.feature_store import Health, Key
from tide_platform.store.hidden_states import HiddenStates

_BATCH = 16


class LanceFeatureStore:
    """Over a dataset that is there. Releases are this consumer's own: rows are durable, other consumers read
    them, and expiry, not consumption, removes them.
    """

    def __init__(self, store: HiddenStates, budget_bytes: int | None = None):
        self._store, self._budget = store, budget_bytes
        self._released: set[Key] = set()
        self._aborted: set[str] = set()  # sample ids

    def put(self, samples: Sequence[Sample], batch_id: str) -> list[Key]:
        if self._budget is not None:
            wanted, used = sum(map(columns.stored_bytes, samples)), self._used()
            if used + wanted > self._budget:
                raise BudgetExceeded(self._store.uri, wanted, used, self._budget)
        names = [sample.meta.sample_id for sample in samples]
        old = [name for name in names if name in self._rows(names)]
        self._store.append(samples, [batch_id])
        rows = self._rows(names)  # the newest of each: row ids grow
        if old:
            handle = self._store.handle
            newest = ", ".join(str(row) for row in rows.values())
            with handle.errors():
                dataset = handle.require(fresh=True)
                dataset.delete(f"sample_id IN ({reading.quoted(old)}) AND _rowid NOT IN ({newest})")
        self._aborted -= set(names)
        return [Key(name, rows[name]) for name in names]

    def get(self, keys: Sequence[Key]) -> Iterator[Sample]:
        if gone := [key.sample_id for key in keys if key in self._released]:
            raise SampleReleased(self._store.uri, gone)
        names = [key.sample_id for key in keys]
        rows = self._rows(names)
        if aborted := [name for name in names if name in self._aborted and name not in rows]:
            raise SampleReleased(self._store.uri, aborted)
        if missing := [name for name in names if name not in rows]:
            raise SamplesMissing(self._store.uri, missing)
        for key in keys:
            if rows[key.sample_id] != key.generation:
                raise StaleGeneration(self._store.uri, key.sample_id, key.generation, rows[key.sample_id])
        handle = self._store.handle
        dataset = handle.require()
        pairs = [(key.sample_id, key.generation) for key in keys]
        for start in range(0, len(pairs), _BATCH):
            yield from reading.load_batch(handle, dataset, pairs[start : start + _BATCH])

    def release(self, keys: Sequence[Key]) -> None:
        self._released |= set(keys)

    def abort(self, batch_id: str) -> None:
        handle = self._store.handle
        dataset = handle.require(fresh=True)
        with handle.errors():
            for ref in reversed(dataset.version_refs()):
                version = ref["version"]
                if batch_id in segments_of(dataset, version):
                    where = f"_row_created_at_version = {version}"
                    rows = reading.read(handle, dataset, ["sample_id"], where)
                    names = rows["sample_id"].to_pylist()
                    if names:
                        self._aborted |= set(names)
                        self._store.remove(names)
                    return

    def gc(self) -> int:
        """Rows that were replaced or aborted leave their bytes behind until old versions go."""
        handle = self._store.handle
        with handle.errors():
            dataset = handle.require(fresh=True)
            dataset.optimize.compact_files(materialize_deletions_threshold=0.0)
            dataset = handle.require(fresh=True)
            return dataset.cleanup_old_versions(older_than=timedelta(hours=1)).bytes_removed

    def health(self) -> Health:
        try:
            tip = self._store.tip()
            used = self._used()
        except StoreError as error:
            return Health(False, str(error), 0, self._budget)
        return Health(True, f"version {tip.version}, {tip.rows} samples", used, self._budget)

    def _rows(self, names: Sequence[str]) -> dict[str, int]:
        """The newest row of each sample id that is there."""
        handle = self._store.handle
        dataset = handle.require()
        rows: dict[str, int] = {}
        for start in range(0, len(names), 500):
            where = f"sample_id IN ({reading.quoted(names[start : start + 500])})"
            table = reading.read(handle, dataset, ["sample_id"], where)
            for name, row in zip(table["sample_id"].to_pylist(), table["_rowid"].to_pylist(), strict=True):
                rows[name] = max(row, rows.get(name, -1))
        return rows

    def _used(self) -> int:
        handle = self._store.handle
        dataset = handle.require()
        names = [f"{name}_bytes" for name in columns.blobs(columns.stream_of(dataset.schema))]
        table = reading.read(handle, dataset, names, None)
        return sum(sum(table[name].to_pylist()) for name in names)
