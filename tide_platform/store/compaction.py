"""Merging small fragments of one tenant and one day, a bounded task at a time.

Lance's own plan merges neighbours; fragments of several tenants alternate, so its tasks are made here, of
fragments that are not neighbours (``CompactionTask.from_json``). Row ids stay as they are.
Fragments of a size merge when eight of them are there, so a byte is copied a few times only, however many
commits brought it; all of a day that is over merge, and so do any two while there are too many.
"""

import json
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import lance
from lance.optimize import Compaction, CompactionOptions, CompactionTask

from tide_platform.store import schema as columns
from tide_platform.store.commits import day_of
from tide_platform.store.durable import sync_new_files
from tide_platform.store.handle import TIME_INDEX, Handle

log = logging.getLogger("tide.maintain")
FANOUT = 8
_TASK_FRAGMENTS = 128
# a fragment of this size is not merged any more, unless there are too many
_TARGET_BYTES = 128 << 20
_UNIT = 64 << 10
_BATCH_ROWS = 16  # rows held in memory at a time: a row may be tens of megabytes


@dataclass(frozen=True)
class Part:
    """What is known of a fragment."""

    fragment_id: int
    tenant: str
    day: str
    size: int  # bytes of its blobs
    deleted: bool  # some of its rows

    @property
    def tier(self) -> int:
        return int(math.log(max(1.0, self.size / _UNIT), FANOUT))


class Compactor:
    def __init__(self, handle: Handle, max_fragments: int):
        self._handle, self._max = handle, max_fragments
        self._parts: dict[int, tuple[str, str, int]] = {}

    def step(self, now: float) -> int:
        """One task; how many fragments were merged, 0 where nothing is left to do. Raises
        :class:`CommitRaced`.
        """
        with self._handle.errors():
            dataset = self._handle.require(fresh=True)
            parts = self._look(dataset)
            chosen = choose(parts, self._max, day_of(now))
            if not chosen:
                return 0
            if dataset.stats.index_stats(TIME_INDEX)["num_unindexed_fragments"]:
                # a task may not mix what an index covers with what it does not
                dataset.optimize.optimize_indices(index_names=[TIME_INDEX])
                dataset = self._handle.require(fresh=True)
            result = _task(dataset, chosen).execute(dataset)
            if self._handle.folder:
                sync_new_files(self._handle.folder)
            Compaction.commit(dataset, [result])
            if self._handle.folder:
                sync_new_files(self._handle.folder)
        log.info("merged %d fragments of %s, %s", len(chosen), chosen[0].tenant, chosen[0].day)
        return len(chosen)

    def _look(self, dataset: lance.LanceDataset) -> list[Part]:
        """Reads plain columns of the fragments that are new since the last call."""
        fragments = {fragment.fragment_id: fragment for fragment in dataset.get_fragments()}
        self._parts = {key: value for key, value in self._parts.items() if key in fragments}
        new = [fragment for key, fragment in fragments.items() if key not in self._parts]
        if new:
            sizes = [f"{name}_bytes" for name in columns.blobs(columns.stream_of(dataset.schema))]
            names = ["tenant", "captured_at", *sizes]
            table = dataset.scanner(columns=names, fragments=new, with_row_address=True).to_table()
            rows = zip(*(table[name].to_pylist() for name in ("_rowaddr", *names)), strict=True)
            for address, tenant, captured_at, *lengths in rows:
                key = address >> 32
                _, _, size = self._parts.get(key, ("", "", 0))
                self._parts[key] = (tenant, day_of(captured_at), size + sum(lengths))
        return [
            Part(key, *value, fragments[key].metadata.deletion_file is not None)
            for key, value in self._parts.items()
        ]


def choose(parts: Sequence[Part], max_fragments: int, today: str) -> list[Part]:
    """The fragments of the next task; empty: nothing is worth it.

    The fragment of the lowest id is left out while it is whole: appends touch it.
    """
    fence = min((part.fragment_id for part in parts), default=-1)
    rewritten = [part for part in parts if part.deleted]
    if rewritten:  # the bytes of expired rows go
        return rewritten[:1]
    crowded = len(parts) > max_fragments * 3 // 4
    limit = _TARGET_BYTES
    if crowded:  # a dataset that has outgrown the target: larger fragments
        limit = max(limit, 4 * sum(part.size for part in parts) // max_fragments)
    groups: dict[tuple[str, str, int], list[Part]] = defaultdict(list)
    for part in parts:
        if part.fragment_id != fence and part.size < limit:
            merge_all = crowded or part.day < today
            groups[part.tenant, part.day, 0 if merge_all else part.tier].append(part)
    best = max(groups.items(), key=lambda item: len(item[1]), default=None)
    if best is None:
        return []
    (_, day, _), members = best
    if len(members) < (2 if crowded or day < today else FANOUT):
        # a day that is over may have less to merge than the largest group of today
        over = [group for (_, of, _), group in groups.items() if of < today and len(group) > 1]
        if not over:
            return []
        members = over[0]
    chosen, size = [], 0
    for part in sorted(members, key=lambda part: part.fragment_id)[:_TASK_FRAGMENTS]:
        if len(chosen) > 1 and size + part.size > limit:
            break
        chosen.append(part)
        size += part.size
    return chosen


def _task(dataset: lance.LanceDataset, parts: Sequence[Part]) -> CompactionTask:
    """A task of these fragments, whatever lies between them, with a plan's options."""
    options: CompactionOptions = {
        "target_rows_per_fragment": 1 << 30,
        "batch_size": _BATCH_ROWS,
        "num_threads": 1,
    }
    planned = Compaction.plan(dataset, options)
    plan = json.loads(planned.json())  # pyright: ignore[reportAttributeAccessIssue]
    metadata = {fragment.fragment_id: fragment.metadata for fragment in dataset.get_fragments()}
    fragments = [metadata[part.fragment_id].to_json() for part in parts]
    task = {"task": {"fragments": fragments}, "read_version": dataset.version, "options": plan["options"]}
    return CompactionTask.from_json(json.dumps(task))  # pyright: ignore[reportAttributeAccessIssue]
