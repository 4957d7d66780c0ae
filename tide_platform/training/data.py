"""Samples as the trainer sees them: which rows a draft learns from, and batches of them.

Shapes: T tokens of a sample, C context positions, R roots (the last R of the context), F = 3H aux width, S
unroll steps, M teacher rows, V target vocabulary; P context positions and Q roots of a batch. A *root* is a
position t at which a chain of draft steps starts; step j of it embeds x[t+1+j] and predicts x[t+2+j] from
teacher row t+1+j.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from tide_platform.capture.record import Sample
from tide_platform.config import TideError
from tide_platform.training.teacher import (
    Teacher,
    TeacherKind,
    finite_bf16,
    read_last_hidden,
    read_topk,
)


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
    teacher: Teacher  # its M rows

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


def prepare(
    sample: Sample,
    inverse: np.ndarray,
    steps: int,
    max_length: int,
    teacher: TeacherKind = "topk",
    target_head_VH: torch.Tensor | None = None,
) -> Example | str:
    """An :class:`Example`, or why the sample teaches nothing. ``inverse``: target -> draft id or -1, [V].

    ``target_head_VH``: the whole head of the target, needed by the teacher ``last_hidden`` alone. Raises
    :class:`~tide_platform.training.teacher.MissingTeacher`.
    """
    tensors, start = sample.tensors, sample.meta.start_pos
    length = min(sample.meta.num_tokens, max_length)
    if (reason := _malformed(tensors)) is not None:
        return reason
    read = (
        read_last_hidden(sample, inverse, target_head_VH)
        if teacher == "last_hidden"
        else read_topk(sample, inverse)
    )
    if isinstance(read, str):
        return read
    rows, ok_M = read
    pairs = supervision(sample, ok_M, steps, length)
    used = [t for p in pairs for t in p[:, 0]]
    if not used:
        return "no supervised position"
    first, context = int(min(used)), int(max(used)) + 1
    at = tensors["row_pos"] - start
    keep = _inside(at, context, mask=True)
    bits = np.zeros((context, tensors["aux"].shape[1]), np.uint16)
    bits[at[keep]] = tensors["aux"][keep]
    if not finite_bf16(bits):
        return "aux states are not finite"
    row_C = np.zeros(context, bool)
    row_C[at[keep]] = True
    return Example(
        sample_id=sample.meta.sample_id,
        tokens_T=torch.from_numpy(tensors["input_ids"][:length].astype(np.int64)),
        start=start,
        aux_CF=torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16),
        row_C=torch.from_numpy(row_C),
        roots=context - first,
        supervised=tuple(p - np.array([first, 0]) for p in pairs),
        teacher=rows,
    )


def prepare_all(
    samples: Iterable[Sample],
    inverse: np.ndarray,
    steps: int,
    max_length: int,
    teacher: TeacherKind = "topk",
    target_head_VH: torch.Tensor | None = None,
) -> tuple[list[Example], dict[str, int]]:
    """All usable examples, and how many were left out by reason.

    Raises :class:`NothingToTrain` if none is usable, and as :func:`prepare` does.
    """
    examples: list[Example] = []
    skipped: Counter[str] = Counter()
    for sample in samples:
        example = prepare(sample, inverse, steps, max_length, teacher, target_head_VH)
        if isinstance(example, str):
            skipped[example] += 1
        else:
            examples.append(example)
    if not examples:
        raise NothingToTrain(dict(skipped))
    return examples, dict(skipped)


@dataclass(frozen=True)
class Batch:
    """Examples one after the other in one row (:class:`~tide_platform.draft.layout.Packed`): no padding."""

    sample_ids: tuple[str, ...]
    contexts: tuple[int, ...]  # C of each example
    roots: tuple[int, ...]  # R of each example
    next_token_1P: torch.Tensor  # int64: x[t+1] of the context position t
    later_token_1QS: torch.Tensor  # int64 [1, Q, S - 1]: x[t+2] .. x[t+S] of the root t; 0 past the end
    positions_1P: torch.Tensor  # int64, absolute
    key_mask_1P: torch.Tensor  # bool: has an aux row
    aux_1PF: torch.Tensor  # bf16
    root_index: tuple[torch.Tensor, ...]  # for each step: int64 [N_j], into the Q roots
    teacher_index: tuple[torch.Tensor, ...]  # for each step: int64 [N_j], into the teacher's rows
    teacher: Teacher

    @property
    def counts(self) -> list[int]:
        """N_j: supervised positions of each step."""
        return [len(i) for i in self.root_index]

    def to(self, device: torch.device | str) -> "Batch":
        moved = {
            f.name: _to(getattr(self, f.name), device)
            for f in fields(self)
            if f.name not in ("sample_ids", "contexts", "roots")
        }
        return replace(self, **moved)


def collate(examples: Sequence[Example]) -> Batch:
    """One batch of examples of the same number of steps."""
    steps = len(examples[0].supervised)
    root_index: list[list[np.ndarray]] = [[] for _ in range(steps)]
    teacher_index: list[list[np.ndarray]] = [[] for _ in range(steps)]
    roots = teacher_rows = 0
    for e in examples:
        for j, pairs in enumerate(e.supervised):
            root_index[j].append(pairs[:, 0] + roots)
            teacher_index[j].append(pairs[:, 1] + teacher_rows)
        roots += e.roots
        teacher_rows += len(e.teacher)
    return Batch(
        sample_ids=tuple(e.sample_id for e in examples),
        contexts=tuple(e.context for e in examples),
        roots=tuple(e.roots for e in examples),
        next_token_1P=torch.cat([e.tokens_T[1 : 1 + e.context] for e in examples])[None],
        later_token_1QS=torch.cat([_later_tokens(e, steps) for e in examples])[None],
        positions_1P=torch.cat([e.start + torch.arange(e.context) for e in examples])[None],
        key_mask_1P=torch.cat([e.row_C for e in examples])[None],
        aux_1PF=torch.cat([e.aux_CF for e in examples])[None],
        root_index=tuple(torch.from_numpy(np.concatenate(i)) for i in root_index),
        teacher_index=tuple(torch.from_numpy(np.concatenate(i)) for i in teacher_index),
        teacher=type(examples[0].teacher).join([e.teacher for e in examples]),
    )


def plan_epoch(examples: Sequence[Example], batch_size: int, seed: int) -> list[list[int]]:
    """Indices of each optimizer step's examples: shuffled, and alike in length within a step, so that
    attention's rectangles are full.

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
    """Splits a step's examples so that no batch holds more than ``max_positions`` positions, each example
    counted as the longest: attention works on rectangles (bounded memory).
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


def _later_tokens(example: Example, steps: int) -> torch.Tensor:
    """int64 [R, S - 1]: the tokens that steps 1 .. S - 1 of each root embed."""
    padded = torch.cat([example.tokens_T, example.tokens_T.new_zeros(steps)])
    first = example.context - example.roots + 2
    return padded[first + torch.arange(example.roots)[:, None] + torch.arange(steps - 1)]


def _malformed(tensors: dict[str, np.ndarray]) -> str | None:
    """Rows that are not as many as the positions they are said to belong to."""
    if len(tensors["aux"]) != len(tensors["row_pos"]):
        return "fewer or more aux rows than positions"
    names = {"teacher_ids", "teacher_logp", "last_hidden"} & set(tensors)
    if any(len(tensors[name]) != len(tensors["teacher_pos"]) for name in names):
        return "fewer or more teacher rows than positions"
    return None


def _to(value: Any, device: torch.device | str) -> Any:
    return tuple(x.to(device) for x in value) if isinstance(value, tuple) else value.to(device)


def _inside(at: np.ndarray, length: int, mask: bool = False) -> np.ndarray:
    inside = (at >= 0) & (at < length)
    return inside if mask else at[inside]
