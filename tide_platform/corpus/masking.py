"""From a text and its answers' spans to token ids and their mask, by offsets: one tokenisation a text.

Shapes: T tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, processors


@dataclass(frozen=True)
class Masked:
    """A tokenised text."""

    input_ids: np.ndarray  # int64 [T]
    mask: np.ndarray  # bool [T]: a response token
    merged: int = 0  # tokens across the edge of an answer: they count as prompt


def exact_offsets(tokenizer: Any) -> Tokenizer:
    """A fast tokenizer of transformers without what it does behind tokenising: adding special tokens (the
    template writes them), cutting, padding, and reporting tokens without the space that they begin with.
    """
    exact = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    exact.post_processor = processors.Sequence([])  # type: ignore[assignment]
    exact.no_truncation()
    exact.no_padding()
    return exact


def mask_text(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]], end_ids: Collection[int]
) -> Masked:
    """A token is a response iff all its characters lie in one of ``spans`` (in characters, ascending).
    ``tokenizer``: of :func:`exact_offsets`.

    What a template writes behind an answer's end token (one of ``end_ids``), a line break mostly, is never
    generated and so is no response.
    """
    encoded = tokenizer.encode(text, add_special_tokens=False)
    ids = np.array(encoded.ids, np.int64)
    starts, ends = _covered(np.array(encoded.offsets, np.int64).reshape(-1, 2))
    mask, merged = np.zeros(len(ids), bool), 0
    for first, last in spans:
        inside = (starts >= first) & (ends <= last) & (ends > starts)
        touching = (starts < last) & (ends > first)
        merged += int((touching & ~inside).sum())
        mask[inside] = True
        stops = np.flatnonzero(inside & np.isin(ids, list(end_ids)))
        if len(stops) and not text[ends[stops[-1]] : last].strip():
            mask[stops[-1] + 1 :] = False
    return Masked(ids, mask, merged)


def marked_spans(text: str, before: str, behind: str) -> list[tuple[int, int]]:
    """Answers in a rendered text: from behind each ``before`` to the end of the next ``behind``, or of the
    text.
    """
    spans, at = [], 0
    while (found := text.find(before, at)) >= 0:
        start = found + len(before)
        end = text.find(behind, start)
        at = len(text) if end < 0 else end + len(behind)
        if at > start:
            spans.append((start, at))
    return spans


def spans_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """Runs of response tokens: [(first, behind the last)]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _covered(offsets_T2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends such that no character is left out: what a tokenizer drops goes to the token behind."""
    starts, ends = offsets_T2[:, 0].copy(), np.maximum.accumulate(offsets_T2[:, 1])
    before = np.concatenate([[0], ends[:-1]])
    return np.minimum(starts, before), ends
