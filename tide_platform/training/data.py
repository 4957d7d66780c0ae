"""Samples as the trainer sees them: which rows a draft learns from, and batches of them.

Shapes: T tokens of a sample, C context positions, R roots (the last R of the context), F = 3H aux width, S
unroll steps, M teacher rows, K kept log-probabilities; B samples of a batch. A *root* is a position t at
which a chain of draft steps starts; step j of it embeds x[t+1+j] and predicts x[t+2+j] from teacher row
t+1+j.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from tide_platform.capture.record import Sample
from tide_platform.config import TideError


class NothingToTrain(TideError):
    """No sample has a supervised position; ``reasons`` counts why each was left out."""

    def __init__(self, reasons: dict[str, int]):
        text = ", ".join(f"{n} x {reason}" for reason, n in reasons.items()) or "no samples were given"
        super().__init__(f"nothing to train on: {text}; check the window's samples with `tide samples`")
        self.reasons = reasons


@dataclass(frozen=True)
class Example:
    """What is left of a sample for training. Positions are counted from its first token."""

    sample_id: str
    tokens_T: torch.Tensor  # int64
    start: int  # absolute position of tokens_T[0]
    aux_CF: torch.Tensor  # bf16; zeros in holes
    row_C: torch.Tensor  # bool: there is an aux row
    roots: int  # R
    supervised: tuple[
        np.ndarray, ...
    ]  # for each step j: [N_j, 2] of (root index in 0..R-1, teacher row in 0..M-1)
    teacher_ids_MK: torch.Tensor  # int32 draft ids (0 where the target id is not in the draft's vocabulary)
    teacher_p_MK: torch.Tensor  # fp32, renormalised over the draft's vocabulary; 0 where not in it

    @property
    def context(self) -> int:
        return len(self.row_C)

    @property
    def response_tokens(self) -> int:
        """Tokens that a first draft step learns to predict."""
        return len(self.supervised[0])


def supervision(sample: Sample, teacher_ok_M: np.ndarray, steps: int, length: int) -> list[np.ndarray]:
    """For each step j the supervised ``(t, teacher row index)``, t counted from the sample's first token.

    The rule (design 4.3): x[t+1+j] and x[t+2+j] are both response tokens, the teacher row t+1+j exists and
    its argmax is in the draft's vocabulary (``teacher_ok_M``), and position t has an aux row. Only the first
    ``length`` tokens count.
    """
    meta, tensors = sample.meta, sample.tensors
    response = np.arange(meta.start_pos, meta.start_pos + length) >= meta.prompt_tokens
    row = np.zeros(length, bool)
    row[_inside(tensors["row_pos"] - meta.start_pos, length)] = True
    teacher = np.full(length, -1, np.int64)
    at = tensors["teacher_pos"] - meta.start_pos
    usable = teacher_ok_M & (at >= 0) & (at < length)
    teacher[at[usable]] = np.flatnonzero(usable)
    pairs = []
    for j in range(steps):
        n = max(0, length - 2 - j)  # the last t whose predicted token exists is length - 3 - j
        ok = (
            row[:n]
            & response[1 + j : 1 + j + n]
            & response[2 + j : 2 + j + n]
            & (teacher[1 + j : 1 + j + n] >= 0)
        )
        t = np.flatnonzero(ok)
        pairs.append(np.stack([t, teacher[t + 1 + j]], 1))
    return pairs


def prepare(sample: Sample, inverse: np.ndarray, steps: int, max_length: int) -> Example | str:
    """An :class:`Example`, or why the sample teaches nothing. ``inverse``: target -> draft id or -1, [V]."""
    tensors, start = sample.tensors, sample.meta.start_pos
    length = min(sample.meta.num_tokens, max_length)
    logp_MK = tensors["teacher_logp"].astype(np.float32)
    if not np.isfinite(logp_MK[:, :1]).all():
        return "teacher is not finite"
    ids_MK = inverse[tensors["teacher_ids"]]
    pairs = supervision(sample, ids_MK[:, 0] >= 0, steps, length)
    used = [t for p in pairs for t in p[:, 0]]
    if not used:
        return "no supervised position"
    first, context = int(min(used)), int(max(used)) + 1
    at = tensors["row_pos"] - start
    keep = _inside(at, context, mask=True)
    bits = np.zeros((context, tensors["aux"].shape[1]), np.uint16)
    bits[at[keep]] = tensors["aux"][keep]
    if (bits & 0x7F80 == 0x7F80).any():  # all exponent bits set: infinity or NaN
        return "aux states are not finite"
    row_C = np.zeros(context, bool)
    row_C[at[keep]] = True
    weight = np.where(ids_MK >= 0, np.exp(logp_MK), 0.0)
    weight /= np.maximum(weight.sum(1, keepdims=True), 1e-12)
    return Example(
        sample_id=sample.meta.sample_id,
        tokens_T=torch.from_numpy(tensors["input_ids"][:length].astype(np.int64)),
        start=start,
        aux_CF=torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16),
        row_C=torch.from_numpy(row_C),
        roots=context - first,
        supervised=tuple(p - np.array([first, 0]) for p in pairs),
        teacher_ids_MK=torch.from_numpy(np.maximum(ids_MK, 0).astype(np.int32)),
        teacher_p_MK=torch.from_numpy(weight.astype(np.float32)),
    )


def prepare_all(
    samples: Iterable[Sample], inverse: np.ndarray, steps: int, max_length: int
) -> tuple[list[Example], dict[str, int]]:
    """All usable examples, and how many were left out by reason. Raises :class:`NothingToTrain` if none is
    usable.
    """
    examples: list[Example] = []
    skipped: Counter[str] = Counter()
    for sample in samples:
        example = prepare(sample, inverse, steps, max_length)
        if isinstance(example, str):
            skipped[example] += 1
        else:
            examples.append(example)
    if not examples:
        raise NothingToTrain(dict(skipped))
    return examples, dict(skipped)


@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded on the left so that their roots are the last R columns of all."""

    tokens_BW: (
        torch.Tensor
    )  # int64 [B, C + S]: column c is the token at context column c; 0 where there is none
    positions_BC: torch.Tensor  # absolute; 0 in the padding
    key_mask_BC: torch.Tensor  # bool: has an aux row
    aux_BCF: torch.Tensor  # bf16
    roots: int  # R
    root_index: tuple[torch.Tensor, ...]  # for each step: int64 [N_j], into the flattened [B * R]
    teacher_index: tuple[torch.Tensor, ...]  # for each step: int64 [N_j], into the teacher rows
    teacher_ids_MK: torch.Tensor  # int64 draft ids
    teacher_p_MK: torch.Tensor  # fp32

    @property
    def counts(self) -> list[int]:
        """N_j: supervised positions of each step."""
        return [len(i) for i in self.root_index]

    def to(self, device: torch.device | str) -> "Batch":
        moved = {
            f.name: tuple(x.to(device) for x in value) if isinstance(value, tuple) else value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), tuple | torch.Tensor)
        }
        return replace(self, **moved)


def collate(examples: Sequence[Example]) -> Batch:
    """One batch of examples of the same number of steps."""
    batch, steps = len(examples), len(examples[0].supervised)
    context, roots = max(e.context for e in examples), max(e.roots for e in examples)
    tokens = torch.zeros(batch, context + steps, dtype=torch.int64)
    positions = torch.zeros(batch, context, dtype=torch.int64)
    mask = torch.zeros(batch, context, dtype=torch.bool)
    aux = torch.zeros(batch, context, examples[0].aux_CF.shape[1], dtype=torch.bfloat16)
    roots_of: list[list[np.ndarray]] = [[] for _ in range(steps)]
    teacher_of: list[list[np.ndarray]] = [[] for _ in range(steps)]
    teacher_rows = 0
    for b, e in enumerate(examples):
        left = context - e.context
        tail = e.tokens_T[: e.context + steps]
        tokens[b, left : left + len(tail)] = tail
        positions[b, left:] = torch.arange(e.start, e.start + e.context)
        mask[b, left:] = e.row_C
        aux[b, left:] = e.aux_CF
        for j, pairs in enumerate(e.supervised):
            roots_of[j].append(pairs[:, 0] + b * roots + roots - e.roots)
            teacher_of[j].append(pairs[:, 1] + teacher_rows)
        teacher_rows += len(e.teacher_ids_MK)
    return Batch(
        tokens_BW=tokens,
        positions_BC=positions,
        key_mask_BC=mask,
        aux_BCF=aux,
        roots=roots,
        root_index=tuple(torch.from_numpy(np.concatenate(r)) for r in roots_of),
        teacher_index=tuple(torch.from_numpy(np.concatenate(t)) for t in teacher_of),
        teacher_ids_MK=torch.cat([e.teacher_ids_MK for e in examples]).long(),
        teacher_p_MK=torch.cat([e.teacher_p_MK for e in examples]),
    )


def plan_epoch(examples: Sequence[Example], batch_size: int, seed: int) -> list[list[int]]:
    """Indices of each optimizer step's examples: shuffled, and alike in length within a step to waste no
    padding.

    Every example occurs once; the last step may be short.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(examples))
    pool = 8 * batch_size  # sorted within pools only: steps stay a random mixture
    steps: list[list[int]] = []
    for at in range(0, len(order), pool):
        chunk = sorted(order[at : at + pool].tolist(), key=lambda i: (examples[i].roots, examples[i].context))
        steps += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    return [steps[i] for i in rng.permutation(len(steps))]


def micro_batches(examples: Sequence[Example], max_positions: int) -> list[list[Example]]:
    """Splits a step's examples so that no batch holds more than ``max_positions`` padded positions (bounded
    memory).
    """
    out: list[list[Example]] = []
    longest = 0
    for e in sorted(examples, key=lambda e: e.context):
        longest = max(longest, e.context)
        if not out or (len(out[-1]) + 1) * longest > max_positions:
            out.append([])
            longest = e.context
        out[-1].append(e)
    return out


def _inside(at: np.ndarray, length: int, mask: bool = False) -> np.ndarray:
    inside = (at >= 0) & (at < length)
    return inside if mask else at[inside]
