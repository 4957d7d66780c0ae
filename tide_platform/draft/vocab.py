"""The draft's vocabulary: which target tokens it can propose, and how well they cover the traffic.

``d2t[i]`` is an *offset*: draft id i is target id ``i + d2t[i]``. ``t2d[v]`` says whether target id v is in
the draft's vocabulary. Both are frozen across fine-tuning: a changed map silently ruins acceptance.
"""

import hashlib
import logging
from collections.abc import Iterable

import numpy as np

log = logging.getLogger("tide.draft")


def count_tokens(responses: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each target id occurs: int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for ids in responses:
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def choose_vocabulary(counts: np.ndarray, draft_vocab_size: int) -> np.ndarray:
    """The ``draft_vocab_size`` most frequent target ids, ascending: int64 [Vd].

    Where fewer distinct tokens occur, the lowest ids fill up (in BPE vocabularies: bytes and the earliest
    merges), and a warning says so. Raises ValueError if Vd is not in 1..V.
    """
    if not 0 < draft_vocab_size <= len(counts):
        raise ValueError(
            f"draft vocabulary of {draft_vocab_size} does not fit a target vocabulary of {len(counts)}"
        )
    if (distinct := int((counts > 0).sum())) < draft_vocab_size:
        log.warning(
            "the corpus has %d distinct tokens, the draft's vocabulary %d: filled up with the %d lowest ids "
            "that do not occur; a smaller vocabulary, or more text, costs the draft less",
            distinct,
            draft_vocab_size,
            draft_vocab_size - distinct,
        )
    by_count = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(by_count[:draft_vocab_size]).astype(np.int64)


def to_maps(target_ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """``(d2t int64 [Vd], t2d bool [V])`` of an ascending list of distinct target ids."""
    d2t = target_ids.astype(np.int64) - np.arange(len(target_ids), dtype=np.int64)
    t2d = np.zeros(vocab_size, bool)
    t2d[target_ids] = True
    return d2t, t2d


def inverse_map(d2t: np.ndarray, vocab_size: int) -> np.ndarray:
    """Target id -> draft id, -1 where the token is not in the draft's vocabulary: int64 [V]."""
    inverse = np.full(vocab_size, -1, np.int64)
    inverse[d2t + np.arange(len(d2t))] = np.arange(len(d2t))
    return inverse


def map_digest(d2t: np.ndarray) -> str:
    """Name of a map by content: first 16 hexadecimal digits of the SHA-256 of ``d2t`` as little-endian
    int64.
    """
    return hashlib.sha256(d2t.astype("<i8").tobytes()).hexdigest()[:16]


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Share of the occurrences that the draft's vocabulary covers, 0..1 (0 if there are none)."""
    total = int(counts.sum())
    return float(counts[t2d].sum() / total) if total else 0.0
