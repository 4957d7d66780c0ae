"""Fills the holes that prefix-cache hits leave: the aux states of a shared beginning, from a sample that
computed it.

A captured row depends on nothing but the tokens up to it. So where a request skipped its first positions
because the server had them cached (a system prompt, mostly), the rows of any other sample with the same first
tokens are its own, up to the rounding of another batch shape. The serving draft *does* attend to those
positions; a draft trained, or replayed, without them sees another context than it is served in.

Rows go from one sample to another of the same tenant only: what is trained on for one tenant holds nothing of
another's. A request that may not be kept is in no dataset, so it gives nothing either.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tide_platform.capture.record import Sample

Key = bytes  # digest of the tenant and the tokens 0 .. p


def fill_prefixes(samples: Sequence[Sample], donors: Iterable[Sample] = ()) -> list[Sample]:
    """The samples, in order, with leading holes filled from one another and from ``donors`` of the same
    tenant where they can be.

    Only holes before a sample's first captured row are filled, and only in samples that start at position 0.
    """
    wanted: dict[Key, np.ndarray | None] = {}
    keys = [_keys(s, _missing(s)) for s in samples]
    for of_sample in keys:
        wanted.update(dict.fromkeys(of_sample))
    if not wanted:
        return list(samples)
    longest = max(len(k) for k in keys)
    for sample in (*samples, *donors):
        if sample.meta.start_pos or not len(sample.tensors["row_pos"]):
            continue
        first = int(sample.tensors["row_pos"][0])
        for p, key in enumerate(_keys(sample, min(longest, sample.meta.num_tokens))):
            row = p - first  # rows are consecutive until the first hole behind the prefix
            if row >= 0 and key in wanted and row < len(sample.tensors["aux"]):
                if sample.tensors["row_pos"][row] != p:
                    break
                wanted[key] = sample.tensors["aux"][row]
    return [_filled(s, [wanted[k] for k in of_sample]) for s, of_sample in zip(samples, keys, strict=True)]


def _keys(sample: Sample, count: int) -> list[Key]:
    return list(prefix_keys(sample.meta.tenant, sample.tensors["input_ids"][:count]))


def _missing(sample: Sample) -> int:
    """How many positions from the first token on have no row."""
    rows = sample.tensors["row_pos"]
    return 0 if sample.meta.start_pos or not len(rows) else int(rows[0])


def prefix_keys(tenant: str, tokens: np.ndarray) -> Iterator[Key]:
    """For each position p of ``tokens`` (from a request's first token on) the key of the tokens 0 .. p."""
    digest = hashlib.blake2b(f"{tenant}\n".encode(), digest_size=16)
    for token in tokens:
        digest.update(int(token).to_bytes(4, "little"))
        yield digest.digest()


def _filled(sample: Sample, rows: list[np.ndarray | None]) -> Sample:
    found = [p for p, row in enumerate(rows) if row is not None]
    if not found:
        return sample
    aux = np.stack([rows[p] for p in found])  # type: ignore[misc]
    tensors = sample.tensors | {
        "row_pos": np.concatenate([np.array(found, np.int32), sample.tensors["row_pos"]]),
        "aux": np.concatenate([aux, sample.tensors["aux"]]),
    }
    return Sample(sample.meta, tensors)
