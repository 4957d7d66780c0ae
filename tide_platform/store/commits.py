"""Commits that cannot pass over one another.

Lance rebases an append over whatever was committed since the version that it was prepared on, so two
committers that both believe they own a batch would store it twice. Here each commit also *touches* the
fragment of the lowest id, unchanged: of two commits prepared on one version the second conflicts, and so does
one prepared before a commit that it has not seen. The lowest id only grows, and whoever removes that fragment
(compaction, expiry) conflicts as well, so no chain of commits goes unnoticed. A dataset without fragments
takes a ``Merge``, which conflicts with everything.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import lance
from lance.dataset import LanceOperation, Transaction
from lance.fragment import FragmentMetadata, write_fragments

from tide_platform.capture.packing import packed_bytes
from tide_platform.capture.record import Sample, StreamMeta, TargetSignal
from tide_platform.store import schema as columns
from tide_platform.store.durable import sync_commit, sync_fragments
from tide_platform.store.errors import StoreUnavailable, StreamMismatch
from tide_platform.store.handle import Handle

SEGMENTS_KEY = "tide.segments"
RECENT_TRANSACTIONS = 32
_LARGE = 16 << 20
_WRITERS = 2


@dataclass(frozen=True)
class Snapshot:
    """A version of the dataset that was read, for a commit to be prepared on."""

    version: int
    dataset: lance.LanceDataset


def write(handle: Handle, dataset: lance.LanceDataset, samples: Sequence[Sample]) -> list[str]:
    """Fragments of these samples as JSON, durable, seen by nobody yet; one a tenant and day (UTC)."""
    schema = dataset.schema
    stream = columns.stream_of(schema)
    groups: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        check_sample(handle.uri, stream, sample)
        groups[sample.meta.tenant, day_of(sample.meta.captured_at)].append(sample)
    parts = [part for _, group in sorted(groups.items()) for part in _halves(group)]

    def put(part: list[Sample]) -> list[FragmentMetadata]:
        table = columns.to_table(part, columns.dataset_schema(stream))
        return write_fragments(
            table, dataset, mode="append", storage_options=handle.options, session=handle.session
        )

    with handle.errors(), ThreadPoolExecutor(_WRITERS) as pool:
        fragments = [fragment for written in pool.map(put, parts) for fragment in written]
        if handle.folder:  # Lance itself syncs nothing
            sync_fragments(handle.folder, [file.path for each in fragments for file in each.files])
    return [json.dumps(fragment.to_json()) for fragment in fragments]


def _halves(samples: list[Sample]) -> list[list[Sample]]:
    """Large ones in two fragments, written at once: one upload alone does not fill the way to the store."""
    middle = len(samples) // 2
    large = sum(map(columns.stored_bytes, samples)) >= _LARGE
    return [samples[:middle], samples[middle:]] if large and middle else [samples]


def commit(
    handle: Handle, snapshot: Snapshot, fragments: Sequence[str], segment_ids: Sequence[str]
) -> Snapshot:
    """One version of all fragments, with the segments' ids in it, read back before it returns.

    Raises :class:`CommitRaced`: nothing was committed, and ``snapshot`` must be read again. After any other
    exception it is unknown whether the commit took place.
    """
    dataset = snapshot.dataset
    new = [FragmentMetadata.from_json(fragment) for fragment in fragments]
    current = dataset.get_fragments()
    if current:
        fence = min(current, key=lambda fragment: fragment.fragment_id).metadata
        operation = LanceOperation.Update(updated_fragments=[fence], new_fragments=new)
    else:
        operation = LanceOperation.Merge(new, dataset.lance_schema)
    transaction = Transaction(
        dataset.version,
        operation,
        transaction_properties={SEGMENTS_KEY: json.dumps(list(segment_ids))},
    )
    try:
        with handle.errors():
            after = lance.LanceDataset.commit(dataset, transaction, storage_options=handle.options)
            found = segments_of(after, after.version)
    except BaseException:
        handle.forget()
        raise
    if set(segment_ids) - found:
        handle.forget()
        raise StoreUnavailable(handle.uri, f"version {after.version} is not the commit that was made")
    if handle.folder:
        sync_commit(handle.folder, after.version, transaction.read_version, transaction.uuid)
    handle.keep(after)
    return Snapshot(after.version, after)


def committed_segments(handle: Handle, dataset: lance.LanceDataset) -> set[str]:
    """Ids of the segments in the newest transactions."""
    found: set[str] = set()
    with handle.errors():
        there = sorted(ref["version"] for ref in dataset.version_refs())[-RECENT_TRANSACTIONS:]
    for version in there:
        try:
            with handle.errors():
                found |= segments_of(dataset, version)
        except StoreUnavailable as error:
            if "was not found" not in error.what:
                raise  # else upkeep has removed that version meanwhile
    return found


def segments_of(dataset: lance.LanceDataset, version: int) -> set[str]:
    try:
        transaction = dataset.read_transaction(version)
    except TypeError:  # pylance cannot show a compaction that rewrote an index; it holds no segments
        return set()
    properties = (transaction.transaction_properties if transaction else None) or {}
    return set(json.loads(properties.get(SEGMENTS_KEY, "[]")))


def day_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def check_sample(uri: str, stream: StreamMeta, sample: Sample) -> None:
    """A sample's widths and target are its dataset's, else its bytes could never be read back."""
    k, digest, aux = (
        sample.tensors["teacher_ids"].shape[1],
        sample.meta.target_digest,
        sample.tensors["aux"],
    )
    features = 3 * stream.hidden_size
    if sample.meta.aux_format == "bf16":
        fits, width = aux.shape[1] == features, aux.shape[1] // 3
    else:
        kept = int(aux[:4].view("uint32")[0]) if len(aux) >= 4 else 0
        rows = len(sample.tensors["row_pos"])
        fits = len(aux) == packed_bytes(sample.meta.aux_format, rows, features, kept)
        width = stream.hidden_size if fits else -1
    last = sample.tensors.get("last_hidden")
    signal: TargetSignal = "topk" if last is None else "last_hidden"
    if last is not None and last.shape[1] != stream.hidden_size:
        fits, width = False, last.shape[1]
    if not fits or (k, digest, signal) != (stream.teacher_k, stream.target_digest, stream.target_signal):
        theirs = replace(stream, target_digest=digest, hidden_size=width, teacher_k=k, target_signal=signal)
        raise StreamMismatch(uri, stream, theirs)
