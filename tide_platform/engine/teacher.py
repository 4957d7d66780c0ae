"""Teacher rows: top-K log-probabilities of raw logits, and the bits of hidden states as they are stored.

Shapes: R rows, V vocabulary, K kept log-probabilities, H hidden size, W columns of the last hidden state (H,
or 0 where it is not captured).
"""

from dataclasses import dataclass

import numpy as np
import torch

_BLOCK = 128


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
    blocks = vocabulary // _BLOCK
    if vocabulary % _BLOCK or blocks <= k:
        values, columns = values_RV.topk(k, -1)
        return values, columns
    blocked = values_RV.reshape(rows, blocks, _BLOCK)
    best = blocked.amax(-1).topk(k, -1, sorted=False).indices
    candidates = blocked.gather(1, best.unsqueeze(-1).expand(-1, -1, _BLOCK)).reshape(rows, k * _BLOCK)
    values, where = candidates.topk(k, -1)
    return values, best.gather(1, where // _BLOCK) * _BLOCK + where % _BLOCK


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
