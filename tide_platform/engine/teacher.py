"""Teacher rows: top-K log-probabilities of raw logits, and the bits of hidden states as they are stored.

Shapes: R rows, V vocabulary, K kept log-probabilities, H hidden size, W columns of the last hidden state (H,
or 0 where it is not captured).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 128
_AT_ONCE = 32  # rows of a block of :class:`HostTeacher`: some megabytes of float32


@dataclass(frozen=True)
class TeacherRows:
    ids: np.ndarray  # int32 [R, K], most likely first
    logp: np.ndarray  # float16 [R, K]
    token_logp: np.ndarray  # float16 [R], of the token that was emitted
    last_hidden: np.ndarray  # uint16 [R, W], bf16 bits

    def __getitem__(self, rows: slice) -> "TeacherRows":
        return TeacherRows(self.ids[rows], self.logp[rows], self.token_logp[rows], self.last_hidden[rows])

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.logp.nbytes + self.token_logp.nbytes + self.last_hidden.nbytes

    @classmethod
    def none(cls, k: int, width: int = 0) -> "TeacherRows":
        rows = (np.empty((0, k), np.int32), np.empty((0, k), np.float16), np.empty(0, np.float16))
        return cls(*rows, np.empty((0, width), np.uint16))


def top_k(values_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their columns, descending, in two stages: the k blocks with the largest
    maxima hold them all. Half the time of one ``torch.topk`` over a large vocabulary on a CPU.
    """
    rows, vocabulary = values_RV.shape
    if not _in_blocks(vocabulary, k):
        values, columns = values_RV.topk(k, -1)
        return values, columns
    blocks = vocabulary // _BLOCK
    first = torch.arange(0, rows * blocks, blocks, device=values_RV.device).view(rows, 1)
    values, where, best = _of_blocks(values_RV, first, k)
    return values, best.gather(1, where // _BLOCK) * _BLOCK + where % _BLOCK


def _in_blocks(vocabulary: int, k: int) -> bool:
    return vocabulary % _BLOCK == 0 and vocabulary // _BLOCK > k


def _of_blocks(
    values_RV: torch.Tensor, first_R1: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest, where each stands among the k best blocks of its row, and those blocks. ``first_R1``:
    each row's first block, counted over all rows.
    """
    rows, vocabulary = values_RV.shape
    blocked = values_RV.reshape(-1, _BLOCK)
    best = blocked.amax(-1).view(rows, vocabulary // _BLOCK).topk(k, -1, sorted=False).indices
    candidates = blocked.index_select(0, (best + first_R1).view(-1)).view(rows, k * _BLOCK)
    values, where = candidates.topk(k, -1)
    return values, where, best


def teacher_tensors(
    raw_RV: torch.Tensor, k: int, emitted_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :class:`TeacherRows` takes from raw logits, on their device; ``emitted_R`` are the ids that were
    emitted after each row.

    A whole log-softmax is one fused pass, cheaper on a CPU than ``logsumexp``, which makes two.
    """
    logp_RV = torch.log_softmax(raw_RV.float(), -1)
    logp, ids = top_k(logp_RV, k)
    token_logp = logp_RV.gather(1, emitted_R.long().view(-1, 1)).view(-1)
    return ids.to(torch.int32), logp.half(), token_logp.half()


class HostTeacher:
    """:func:`teacher_rows` of raw logits in host memory, at each step: the runs of rows are read where they
    are, the log-probabilities go to one buffer, and what is small is numpy's, for a step of the server has
    emptied the caches and each further operation of torch costs ten microseconds then.
    """

    def __init__(self, k: int):
        self.k = k
        self._logp_BV = torch.empty(0, 0)
        self._first_B1 = torch.empty(0, 1, dtype=torch.int64)  # as in :func:`_of_blocks`

    def rows(self, runs: Sequence[torch.Tensor], emitted_R: np.ndarray) -> TeacherRows:
        """``runs``: raw logits [r, V] of rows that follow one another; R rows in all. Without last hidden
        states.
        """
        found: list[tuple[np.ndarray, ...]] = []
        at = 0
        for block in _blocks(runs):
            logp_BV = self._log_softmax(block)
            rows = np.arange(logp_BV.shape[0])
            logp, ids = self._top_k(logp_BV, rows)
            token_logp = logp_BV.numpy()[rows, emitted_R[at : at + len(rows)]]
            found.append((ids.astype(np.int32), logp.astype(np.float16), token_logp.astype(np.float16)))
            at += len(rows)
        ids, logp, token_logp = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        return TeacherRows(ids, logp, token_logp, np.empty((at, 0), np.uint16))

    def _top_k(self, logp_BV: torch.Tensor, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """:func:`top_k`."""
        if not _in_blocks(logp_BV.shape[1], self.k):
            values, columns = logp_BV.topk(self.k, -1)
            return values.numpy(), columns.numpy()
        values, where, best = _of_blocks(logp_BV, self._first_B1[: len(rows)], self.k)
        place = where.numpy()
        return values.numpy(), best.numpy()[rows[:, None], place // _BLOCK] * _BLOCK + place % _BLOCK

    def _log_softmax(self, block: list[torch.Tensor]) -> torch.Tensor:
        """Lies in the buffer, until the next call."""
        if self._logp_BV.shape[1] != (vocabulary := block[0].shape[1]):
            self._logp_BV = torch.empty(_AT_ONCE, vocabulary)
            self._first_B1 = torch.arange(_AT_ONCE).view(-1, 1) * (vocabulary // _BLOCK)
        end = 0
        for run in block:
            at, end = end, end + run.shape[0]
            torch.log_softmax(run, -1, dtype=torch.float32, out=self._logp_BV[at:end])
        return self._logp_BV[:end]


def _blocks(runs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    block: list[torch.Tensor] = []
    rows = 0
    for run in runs:
        for part in run.split(_AT_ONCE) if run.shape[0] > _AT_ONCE else (run,):
            if rows + part.shape[0] > _AT_ONCE:
                yield block
                block, rows = [], 0
            block.append(part)
            rows += part.shape[0]
    yield block


def teacher_rows(
    raw_RV: torch.Tensor, k: int, emitted_R: torch.Tensor, last_RH: torch.Tensor | None = None
) -> TeacherRows:
    """:func:`teacher_tensors` and the last hidden states in host memory, waiting for them."""
    last = np.empty((len(raw_RV), 0), np.uint16) if last_RH is None else bf16_bits(last_RH)
    ids, logp, token_logp = (part.cpu().numpy() for part in teacher_tensors(raw_RV, k, emitted_R))
    return TeacherRows(ids, logp, token_logp, last)


def bf16_bits(hidden: torch.Tensor) -> np.ndarray:
    """Hidden states [R, …] of any float type as the bit pattern of bfloat16, uint16 of the same shape."""
    return hidden.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
