"""One forward step of the server as capture sees it, and the way of its rows to the writer.

The hooks make a step right after SGLang's own computation, on the scheduler's thread (and, on a GPU, on the
forward stream); a :class:`Stager` takes it from there. Every call that reaches the writer goes through the
stager, in order and on one thread: a sample's end stays behind its rows.

Shapes: B requests of the batch, P planned ones (those captured), n rows a request in a verify step (k + 1),
R rows, V vocabulary, H hidden size, K teacher log-probabilities a row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tide_platform.engine.capture import Capture, OpenSample
from tide_platform.engine.teacher import HostTeacher, TeacherRows, bf16_bits, teacher_rows


class Planned(NamedTuple):
    """A captured request in a batch. The tokens are the host's, known before the step: no device read."""

    place: int  # in the batch
    sample: OpenSample
    tokens_pos: int
    tokens: np.ndarray  # int32, certain tokens from tokens_pos on that were not given before


@dataclass(frozen=True)
class VerifyStep:
    """A verify step. Row ``place * n + j`` has its input token at position ``seq_lens[place] + j``, and
    ``predict`` of it is the token that follows; the first ``accept_lens[place]`` rows count.

    The tensors are the engine's: on a GPU the next step overwrites them.
    """

    plan: list[Planned]
    n: int
    hidden: torch.Tensor  # [B*n, 3H]
    raw: torch.Tensor  # [B*n, V] raw logits; only the planned requests' [P*n, V] where raw_planned
    raw_planned: bool
    predict: torch.Tensor  # int [B*n]
    accept_lens: torch.Tensor  # int [B], the bonus token included
    seq_lens: torch.Tensor  # int [B], before this step
    last: torch.Tensor | None = None  # [B*n, H] last hidden states, where they are captured


@dataclass(frozen=True)
class PrefillStep:
    """A prefill step, or a chunk of one. Row ``offsets[i] + j`` is of ``plan[i]``, at ``starts[i] + j``."""

    plan: list[Planned]
    hidden: torch.Tensor  # [sum of all extend lengths, 3H]
    starts: list[int]
    counts: list[int]
    offsets: list[int]
    # of the planned requests whose last row lies within their response (they were retracted), by index in
    # the plan, ascending: raw logits of that row and the token that was drawn
    answered: list[int]
    raw: torch.Tensor | None = None  # [len(answered), V]
    drawn: torch.Tensor | None = None  # int [len(answered)]
    last: torch.Tensor | None = None  # as hidden: [sum of all extend lengths, H] last hidden states

    def answered_rows(self) -> list[int]:
        """Rows of ``hidden`` and ``last`` that ``raw`` is of."""
        return [self.offsets[i] + self.counts[i] - 1 for i in self.answered]


class Stager(Protocol):
    """Takes steps in order and hands their rows to :class:`Capture`, at once or later."""

    def stage(self, step: VerifyStep | PrefillStep) -> None: ...

    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        """Calls ``work(*arguments)``, behind the rows that were staged before."""
        ...


class DirectStager:
    """Runs at once: right where the device is the CPU."""

    def __init__(self, capture: Capture, teacher_k: int, last_width: int = 0):
        self.capture, self.teacher_k, self.last_width = capture, teacher_k, last_width
        self._teacher = HostTeacher(teacher_k)

    def stage(self, step: VerifyStep | PrefillStep) -> None:
        if isinstance(step, VerifyStep):
            self._verified(step)
        else:
            self._prefilled(step)

    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def _verified(self, step: VerifyStep) -> None:
        starts, accepted = step.seq_lens.tolist(), step.accept_lens.tolist()
        raw: list[torch.Tensor] = []
        rows: list[slice] = []  # of the step's, by planned request
        for order, planned in enumerate(step.plan):
            count, first = accepted[planned.place], planned.place * step.n
            rows.append(slice(first, first + count))
            first = order * step.n if step.raw_planned else first
            raw.append(step.raw[first : first + count])
        predict, aux = step.predict.numpy(), bf16_bits(step.hidden)
        last = None if step.last is None else bf16_bits(step.last)
        teacher = self._teacher.rows(raw, np.concatenate([predict[of] for of in rows]))
        at = 0
        for planned, of in zip(step.plan, rows, strict=True):
            pos, count = starts[planned.place], accepted[planned.place]
            part = teacher[at : at + count]
            if last is not None:
                part = replace(part, last_hidden=last[of])
            self.capture.saw_round(planned.sample, step.n - 1)
            self._write(planned, pos, aux[of], pos, part)
            at += count

    def _prefilled(self, step: PrefillStep) -> None:
        answers = TeacherRows.none(self.teacher_k, self.last_width)
        if step.raw is not None and step.drawn is not None:
            last = None if step.last is None else step.last[step.answered_rows()]
            answers = teacher_rows(step.raw, self.teacher_k, step.drawn, last)
        for i, planned in enumerate(step.plan):
            start, count, offset = step.starts[i], step.counts[i], step.offsets[i]
            before = min(count, max(0, planned.sample.start_pos - start))  # of the prompt, not kept
            aux = bf16_bits(step.hidden[offset + before : offset + count])
            of = slice(0, 0)
            if i in step.answered:
                order = step.answered.index(i)
                of = slice(order, order + 1)
            self._write(planned, start + before, aux, start + count - 1, answers[of])

    def _write(
        self, planned: Planned, pos: int, aux: np.ndarray, teacher_pos: int, rows: TeacherRows
    ) -> None:
        if len(aux) or len(planned.tokens):
            self.capture.write(
                planned.sample, pos, aux, teacher_pos, rows, planned.tokens_pos, planned.tokens
            )


def plan_request(
    place: int, sample: OpenSample, prompt: Sequence[int], response: Sequence[int], end: int
) -> Planned:
    """Plans a request with the tokens before position ``end`` that the ring lacks.

    ``response``: the tokens known before the step. ``end`` is not beyond the step's own rows: the spool lets
    a stretch go when its tokens are there.
    """
    start = sample.next_token
    tokens = tokens_between(prompt, response, start, end)
    sample.next_token = start + len(tokens)
    return Planned(place, sample, start, tokens)


def tokens_between(prompt: Sequence[int], response: Sequence[int], start: int, end: int) -> np.ndarray:
    """int32, a request's tokens at positions start … end-1; empty where ``end`` is not beyond ``start``."""
    length = len(prompt)
    if start >= length:  # each round but the first: the prompt, however long, is not touched
        return np.array(response[start - length : max(0, end - length)], np.int32)
    return np.array([*prompt[start:end], *response[: max(0, end - length)]], np.int32)
