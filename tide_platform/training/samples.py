"""Samples as a run reads them: metadata of all at once, tensors of a few at a time, and damage as a value.

The order is the caller's: sample i is the i-th of ``metas``. Leading holes of prefix-cache hits are filled
(:mod:`tide_platform.draft.prefix`) from donors that the metadata and tokens single out, so that nothing but
those is read for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import lance
import numpy as np

from tide_platform.capture.record import TENSORS, Sample, SampleMeta
from tide_platform.draft.prefix import Key, fill_prefixes, prefix_keys
from tide_platform.store import reading
from tide_platform.store.errors import BlobCorrupt, NoDataset, SamplesMissing
from tide_platform.store.feature_store import SampleRef
from tide_platform.store.hidden_states import HiddenStates

_ROWS_A_READ = 500
_DONOR_BYTES = 256 << 20  # rows of donors kept at hand


class Samples(Protocol):
    """A source of samples. One thread at a time uses it."""

    @property
    def metas(self) -> Sequence[SampleMeta]: ...

    def tokens(self, chosen: Sequence[int]) -> Iterator[np.ndarray]:
        """``input_ids`` (int32 [T]) of each, in order; no large tensor is read."""
        ...

    def load(self, chosen: Sequence[int]) -> list[Sample | str]:
        """Each sample, in order, checksums verified, leading holes filled; or why it cannot be had."""
        ...


class MemorySamples:
    """Samples that are in memory already."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = fill_prefixes(samples)
        self.metas = [sample.meta for sample in samples]

    def tokens(self, chosen: Sequence[int]) -> Iterator[np.ndarray]:
        return (self._samples[i].tensors["input_ids"] for i in chosen)

    def load(self, chosen: Sequence[int]) -> list[Sample | str]:
        return [self._samples[i] for i in chosen]


class StoredSamples:
    """Samples of the dataset at one version of it."""

    def __init__(self, store: HiddenStates, refs: Sequence[SampleRef], version: int | None = None):
        """``version``: None is the newest. Raises :class:`~tide_platform.store.errors.NoDataset`."""
        self.metas = list(refs)
        self._handle = store.handle
        dataset = store.handle.at(version)
        if dataset is None:
            raise NoDataset(store.uri)
        self._dataset: lance.LanceDataset = dataset
        self._donors_of, self._donor_rows = self._find_donors()
        self._donors: dict[int, Sample] = {}

    def tokens(self, chosen: Sequence[int]) -> Iterator[np.ndarray]:
        for _, row in self._plain(chosen, ["input_ids"]):
            yield row["input_ids"]

    def load(self, chosen: Sequence[int]) -> list[Sample | str]:
        found = self._read(chosen)
        return [
            fill_prefixes([item], self._donors_for(i))[0]
            if isinstance(item, Sample) and i in self._donors_of
            else item
            for i, item in zip(chosen, found, strict=True)
        ]

    def _read(self, chosen: Sequence[int]) -> list[Sample | str]:
        """One damaged sample must not cost its neighbours: they are read again without it."""
        found: dict[str, Sample | str] = {}
        pairs = [(self.metas[i].sample_id, self.metas[i].row_id) for i in chosen]
        left = list(dict.fromkeys(pairs))
        while left:
            try:
                for sample in reading.load_batch(self._handle, self._dataset, left):
                    found[sample.meta.sample_id] = sample
            except BlobCorrupt as error:
                found[error.sample_id] = f"damaged in storage ({error.column})"
            except SamplesMissing as error:
                found |= dict.fromkeys(error.sample_ids, "expired while training")
            left = [pair for pair in left if pair[0] not in found]
        return [found[name] for name, _ in pairs]

    def _plain(
        self, chosen: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """(index, list columns) of each, in order."""
        for start in range(0, len(chosen), _ROWS_A_READ):
            part = chosen[start : start + _ROWS_A_READ]
            ids = [self.metas[i].row_id for i in part]
            with self._handle.errors():
                table = self._dataset._take_rows(ids, columns=["sample_id", *columns])
            if table.num_rows != len(part):
                there = set(table["sample_id"].to_pylist())
                gone = [self.metas[i].sample_id for i in part]
                raise SamplesMissing(self._handle.uri, [name for name in gone if name not in there])
            lists = {name: table[name].combine_chunks() for name in columns}
            for at, index in enumerate(part):
                yield index, {n: a[at].values.to_numpy(zero_copy_only=False) for n, a in lists.items()}

    def _find_donors(self) -> tuple[dict[int, list[int]], int]:
        """For each sample with a leading hole, the samples that hold its rows; and the longest hole.

        Only flagged samples are looked at, and only their tenants' samples can give.
        """
        flagged = [
            i
            for i, meta in enumerate(self.metas)
            if "truncated_context" in meta.flags and meta.start_pos == 0
        ]
        if not flagged:
            return {}, 0
        wanted: dict[int, list[Key]] = {}
        for i, row in self._plain(flagged, ["input_ids", "row_pos"]):
            if len(row["row_pos"]) and row["row_pos"][0] > 0:
                hole = row["input_ids"][: row["row_pos"][0]]
                wanted[i] = list(prefix_keys(self.metas[i].tenant, hole))
        keys = {key for of_sample in wanted.values() for key in of_sample}
        givers: dict[Key, int] = {}
        tenants = {self.metas[i].tenant for i in wanted}
        candidates = [i for i, m in enumerate(self.metas) if m.tenant in tenants and m.start_pos == 0]
        candidates.sort(key=lambda i: "truncated_context" in self.metas[i].flags)  # whole ones give most
        longest = max((len(of_sample) for of_sample in wanted.values()), default=0)
        for i, row in self._plain(candidates, ["input_ids", "row_pos"]):
            for key in _held(self.metas[i].tenant, row["input_ids"][:longest], row["row_pos"], keys):
                givers.setdefault(key, i)
        donors = {
            i: list(dict.fromkeys(givers[key] for key in of_sample if key in givers))
            for i, of_sample in wanted.items()
        }
        return {i: of_sample for i, of_sample in donors.items() if of_sample}, longest

    def _donors_for(self, index: int) -> list[Sample]:
        missing = [i for i in self._donors_of[index] if i not in self._donors]
        for i, item in zip(missing, self._read(missing), strict=True):
            if isinstance(item, Sample):
                self._donors[i] = _beginning(item, self._donor_rows)
        donors = [self._donors[i] for i in self._donors_of[index] if i in self._donors]
        if sum(sample.tensors["aux"].nbytes for sample in self._donors.values()) > _DONOR_BYTES:
            self._donors.clear()
        return donors


def find_refs(store: HiddenStates, sample_ids: Sequence[str], version: int | None) -> dict[str, SampleRef]:
    """The metadata of those of the samples that are there at this version."""
    found: dict[str, SampleRef] = {}
    for start in range(0, len(sample_ids), _ROWS_A_READ):
        part = sample_ids[start : start + _ROWS_A_READ]
        where = f"sample_id IN ({reading.quoted(part)})"
        found |= {ref.sample_id: ref for ref in store.refs(version, where)}
    return found


def _held(tenant: str, tokens: np.ndarray, row_pos: np.ndarray, wanted: set[Key]) -> list[Key]:
    """Those of the wanted rows that a sample has, up to its first hole behind its first row."""
    held: list[Key] = []
    first = int(row_pos[0]) if len(row_pos) else len(tokens)
    for p, key in enumerate(prefix_keys(tenant, tokens)):
        if key not in wanted:  # nor is any longer beginning
            break
        row = p - first
        if row >= 0:
            if row >= len(row_pos) or row_pos[row] != p:
                break
            held.append(key)
    return held


def _beginning(sample: Sample, length: int) -> Sample:
    """The first ``length`` tokens and their rows, no teacher."""
    tensors = sample.tensors
    length = min(length, sample.meta.num_tokens)
    rows = int(np.searchsorted(tensors["row_pos"], length))
    kept = {"input_ids": tensors["input_ids"][:length], "row_pos": tensors["row_pos"][:rows]}
    kept["aux"] = tensors["aux"][:rows].copy()
    empty = {
        name: np.zeros((0,) * dimensions, dtype)
        for name, (dtype, dimensions) in TENSORS.items()
        if name not in kept
    }
    return Sample(replace(sample.meta, num_tokens=length), kept | empty)
