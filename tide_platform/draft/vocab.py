"""The draft's vocabulary: which target tokens it can propose, and how well they cover the traffic.

``d2t[i]`` is an *offset*: draft id i is target id ``i + d2t[i]``. ``t2d[v]`` says whether target id v is in
the draft's vocabulary. Both are frozen across fine-tuning: a changed map silently ruins acceptance.
"""

from collections.abc import Iterable

import numpy as np


def count_tokens(responses: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each target id occurs: int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for ids in responses:
        counts += np.bincount(ids, minlength=vocab_size)
    return counts


def choose_vocabulary(counts: np.ndarray, draft_vocab_size: int) -> np.ndarray:
    """The ``draft_vocab_size`` most frequent target ids, ascending: int64 [Vd].

    Where fewer distinct tokens occur, the lowest ids fill up (in BPE vocabularies: bytes and the earliest
    merges). Raises ValueError if Vd is not in 1..V.
    """
    if not 0 < draft_vocab_size <= len(counts):
        raise ValueError(
            f"draft vocabulary of {draft_vocab_size} does not fit a target vocabulary of {len(counts)}"
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


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Share of the occurrences that the draft's vocabulary covers, 0..1 (0 if there are none)."""
    total = int(counts.sum())
    return float(counts[t2d].sum() / total) if total else 0.0
