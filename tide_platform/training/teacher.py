"""What a draft learns from: the target's distribution over the draft's vocabulary, in one of two forms.

``TopK``: the target's K most likely tokens, as captured. ``LastHidden``: its last hidden state, from which
its head gives every logit: exact, at 2 H bytes a row where top-K takes 6 K. Both are restricted to the
draft's vocabulary and renormalised; whether a row teaches at all is decided by the argmax over the *whole*
target vocabulary (design 4.3).

Shapes: M teacher rows, K kept log-probabilities, H hidden, V target vocabulary, Vd draft vocabulary; N rows
of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch

from tide_platform.capture.record import Sample
from tide_platform.config import TideError
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft

TeacherKind = Literal["topk", "last_hidden"]
# what families do to logits behind the head: Gemma, Granite, Cohere, Falcon-H1
_LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
VOCAB_AT_ONCE = 4096  # logits of so many target tokens exist at a time where only the argmax is wanted


class MissingTeacher(TideError):
    """``training.teacher`` asks for something that ``what`` (samples, a dataset, or the caller) lacks."""

    def __init__(self, what: str, missing: str):
        super().__init__(
            f"{what}: training.teacher is last_hidden, but {missing}; set training.teacher to topk, or "
            "capture with capture.target_signal: last_hidden"
        )
        self.what, self.missing = what, missing


class HeadNotLinear(TideError):
    """The target's logits are not its head times its last hidden state."""

    def __init__(self, target: Path, setting: str, value: object):
        super().__init__(
            f"{target}: training.teacher is last_hidden, but the target's config has {setting} {value}: its "
            "logits are not lm_head times the last hidden state; set training.teacher to topk"
        )
        self.target, self.setting, self.value = target, setting, value


class Distribution(Protocol):
    """p over the draft's vocabulary, of a block of N rows."""

    def expectation(self, logits_NV: torch.Tensor, shift_N1: torch.Tensor) -> torch.Tensor:
        """Sum over v of p(v) (logit(v) - shift), fp32 [N]."""
        ...

    def subtract(self, from_NV: torch.Tensor, weight_N1: torch.Tensor) -> None:
        """``from -= weight * p``, in place."""
        ...


@dataclass(frozen=True)
class Sparse:
    """p is 0 but at ``ids_NK``, draft ids. An id may occur again with p 0."""

    ids_NK: torch.Tensor
    p_NK: torch.Tensor

    def expectation(self, logits_NV: torch.Tensor, shift_N1: torch.Tensor) -> torch.Tensor:
        return (self.p_NK * (logits_NV.gather(1, self.ids_NK).float() - shift_N1)).sum(-1)

    def subtract(self, from_NV: torch.Tensor, weight_N1: torch.Tensor) -> None:
        from_NV.scatter_add_(1, self.ids_NK, -self.p_NK * weight_N1)


@dataclass(frozen=True)
class Dense:
    p_NV: torch.Tensor

    def expectation(self, logits_NV: torch.Tensor, shift_N1: torch.Tensor) -> torch.Tensor:
        return (self.p_NV * (logits_NV.float() - shift_N1)).sum(-1)

    def subtract(self, from_NV: torch.Tensor, weight_N1: torch.Tensor) -> None:
        from_NV.addcmul_(self.p_NV, weight_N1, value=-1)


class Teacher(Protocol):
    """M rows of one form; ``best_M``: draft id of the target's argmax (0 where it is in no vocabulary)."""

    @property
    def best_M(self) -> torch.Tensor: ...
    def __len__(self) -> int: ...
    def to(self, device: torch.device | str) -> Self: ...
    def take(self, index: torch.Tensor) -> Self:
        """The rows at ``index``, in its order."""
        ...

    @classmethod
    def join(cls, parts: Sequence[Any]) -> Self:
        """All rows of teachers of this form, in order."""
        ...

    def block(self, span: slice, head_VH: torch.Tensor | None) -> Distribution:
        """p of the rows in ``span``. ``head_VH``: the target head's rows of the draft's vocabulary."""
        ...


@dataclass(frozen=True)
class TopK:
    ids_MK: torch.Tensor  # int64 draft ids, the argmax first; 0 where the target id has none
    p_MK: torch.Tensor  # fp32, renormalised over the draft's vocabulary; 0 where the id has none

    @property
    def best_M(self) -> torch.Tensor:
        return self.ids_MK[:, 0]

    def __len__(self) -> int:
        return len(self.ids_MK)

    def to(self, device: torch.device | str) -> "TopK":
        return TopK(self.ids_MK.to(device), self.p_MK.to(device))

    def take(self, index: torch.Tensor) -> "TopK":
        return TopK(self.ids_MK[index], self.p_MK[index])

    @classmethod
    def join(cls, parts: "Sequence[TopK]") -> "TopK":
        return TopK(torch.cat([t.ids_MK for t in parts]), torch.cat([t.p_MK for t in parts]))

    def block(self, span: slice, head_VH: torch.Tensor | None) -> Distribution:
        return Sparse(self.ids_MK[span], self.p_MK[span])


@dataclass(frozen=True)
class LastHidden:
    best_M: torch.Tensor  # int64
    hidden_MH: torch.Tensor  # bf16, after the target's final norm

    def __len__(self) -> int:
        return len(self.best_M)

    def to(self, device: torch.device | str) -> "LastHidden":
        return LastHidden(self.best_M.to(device), self.hidden_MH.to(device))

    def take(self, index: torch.Tensor) -> "LastHidden":
        return LastHidden(self.best_M[index], self.hidden_MH[index])

    @classmethod
    def join(cls, parts: "Sequence[LastHidden]") -> "LastHidden":
        return LastHidden(torch.cat([t.best_M for t in parts]), torch.cat([t.hidden_MH for t in parts]))

    def block(self, span: slice, head_VH: torch.Tensor | None) -> Distribution:
        assert head_VH is not None  # loss_and_stats has asked for it
        logits = self.hidden_MH[span].to(head_VH.dtype) @ head_VH.T
        return Dense(torch.softmax(logits, -1, dtype=torch.float32))


def read_topk(sample: Sample, inverse: np.ndarray) -> tuple[TopK, np.ndarray] | str:
    """``(teacher, bool [M]: the argmax is in the draft's vocabulary)``, or why there is none."""
    logp_MK = sample.tensors["teacher_logp"].astype(np.float32)
    possible = logp_MK < np.inf  # false for NaN too; -inf, probability 0, may stand in the tail
    if not (possible.all() and np.isfinite(logp_MK[:, :1]).all()):
        return "teacher is not finite"
    ids_MK = inverse[sample.tensors["teacher_ids"]]
    p_MK = np.where(ids_MK >= 0, np.exp(logp_MK), 0.0)
    p_MK /= np.maximum(p_MK.sum(1, keepdims=True), 1e-12)
    teacher = TopK(torch.from_numpy(np.maximum(ids_MK, 0)), torch.from_numpy(p_MK.astype(np.float32)))
    return teacher, ids_MK[:, 0] >= 0


def read_last_hidden(
    sample: Sample, inverse: np.ndarray, target_head_VH: torch.Tensor | None
) -> tuple[LastHidden, np.ndarray] | str:
    """As :func:`read_topk`, from the optional tensor ``last_hidden`` (uint16 [M, H]: bf16 bits).

    Raises :class:`MissingTeacher`.
    """
    bits_MH = sample.tensors.get("last_hidden")
    if bits_MH is None:
        raise MissingTeacher(f"sample {sample.meta.sample_id}", "it holds no last hidden states")
    if target_head_VH is None:
        raise MissingTeacher(f"sample {sample.meta.sample_id}", "no target head was given")
    if not finite_bf16(bits_MH):
        return "teacher is not finite"
    hidden_MH = torch.from_numpy(bits_MH.view(np.int16).copy()).view(torch.bfloat16)
    best_M = inverse[target_argmax(hidden_MH, target_head_VH).numpy()]
    return LastHidden(torch.from_numpy(np.maximum(best_M, 0)), hidden_MH), best_M >= 0


def target_argmax(hidden_MH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    """Most likely target id of each last hidden state, int64 [M]; logits of ``VOCAB_AT_ONCE`` ids exist at a
    time.
    """
    wide_MH = hidden_MH.float()
    top_M = torch.full((len(wide_MH),), -torch.inf)
    best_M = torch.zeros(len(wide_MH), dtype=torch.int64)
    for at in range(0, len(head_VH), VOCAB_AT_ONCE):
        logit_M, id_M = (wide_MH @ head_VH[at : at + VOCAB_AT_ONCE].float().T).max(-1)
        better_M = logit_M > top_M
        top_M, best_M = torch.where(better_M, logit_M, top_M), torch.where(better_M, id_M + at, best_M)
    return best_M


def target_head(target: TargetParts) -> torch.Tensor:
    """The head [V, H] that makes the target's logits of its last hidden states.

    Raises :class:`HeadNotLinear` where the config says that something else happens to them on the way.
    """
    for setting in _LOGIT_SETTINGS:
        if target.config.get(setting) not in (None, 1, 0):
            raise HeadNotLinear(target.folder, setting, target.config[setting])
    return target.lm_head_VH


def restricted_head(target_head_VH: torch.Tensor, draft: Eagle3Draft) -> torch.Tensor:
    """The target head's rows of the draft's vocabulary, [Vd, H], in the order of the draft's ids."""
    ids = draft.target_ids(torch.arange(draft.config.draft_vocab_size, device=draft.d2t.device))
    return target_head_VH[ids.to(target_head_VH.device)]


@dataclass(frozen=True)
class Heads:
    """What the teacher ``last_hidden`` needs of the target; of the teacher ``topk``, nothing."""

    whole_VH: torch.Tensor | None = None  # all of the target's vocabulary
    restricted_VH: torch.Tensor | None = None  # the draft's vocabulary

    @classmethod
    def of(cls, kind: TeacherKind, target: TargetParts, draft: Eagle3Draft) -> "Heads":
        """Raises :class:`HeadNotLinear`."""
        if kind == "topk":
            return cls()
        whole_VH = target_head(target)
        return cls(whole_VH, restricted_head(whole_VH, draft))


NO_HEADS = Heads()  # of the teacher `topk`


def finite_bf16(bits: np.ndarray) -> bool:
    """No infinity and no NaN among bf16 bit patterns: none has all its exponent bits set."""
    return not (bits & 0x7F80 == 0x7F80).any()
