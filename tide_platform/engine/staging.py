"""Rows off a GPU without a stop of the scheduler's thread.

A step's rows are gathered into preallocated device memory on the stream that made them, before the next step
overwrites them; a side stream copies them to pinned memory; a thread waits for the copy (it sleeps, and the
scheduler's thread runs on) and hands them to :class:`Capture`. All that reaches the writer goes through that
thread's one queue, so that a sample's beginning, rows and end keep their order.

Nothing here reads a device value on the scheduler's thread. Written for ``torch.cuda``, which is what CUDA
and ROCm builds of torch call it.

Shapes: P planned requests, n rows a request (k + 1), R rows of a slot, K log-probabilities, W = 3H.
"""

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tide_platform.engine.capture import Capture
from tide_platform.engine.staging_memory import Arrival, CudaDevice, Shape, Slot, Staging, gather
from tide_platform.engine.steps import Planned, PrefillStep, VerifyStep
from tide_platform.engine.teacher import TeacherRows, teacher_tensors

logger = logging.getLogger("tide")

FULL = "staging_full"  # the reason under which samples are dropped when all slots are busy
_TEACHER = ("ids", "logp", "token_logp", "last_hidden")  # a row a teacher row
_LOGIT_ROWS = 64  # softmaxed at a time: bounds the memory that a step borrows


class StreamStager:
    """A :class:`~tide_platform.engine.steps.Stager` whose rows arrive later."""

    def __init__(self, capture: Capture, staging: Staging, failed: Callable[[Exception], None]):
        """``failed`` is told of a fault on the other thread, on that thread."""
        self.capture, self.staging, self._failed = capture, staging, failed
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tide-staging", daemon=True).start()

    # ---- the scheduler's thread ----

    def stage(self, step: VerifyStep | PrefillStep) -> None:
        if isinstance(step, VerifyStep):
            self._verified(step)
        else:
            self._prefilled(step)

    def run(self, work: Callable[..., object], *arguments: Any) -> None:
        self._queue.put(lambda: work(*arguments))

    def _verified(self, step: VerifyStep) -> None:
        each = self.staging.shape.rows // step.n  # requests of a slot
        parts = [step.plan[at : at + each] for at in range(0, len(step.plan), each)]
        slots = self._take(len(parts), step.plan)
        order = 0
        for slot, plan in zip(slots, parts, strict=False):
            self._stage_verified(slot, plan, step, order * step.n)
            order += len(plan)

    def _stage_verified(self, slot: Slot, plan: list[Planned], step: VerifyStep, planned_row: int) -> None:
        """``planned_row``: the plan's first row where only planned rows count."""
        device, staged = self.staging.device, slot.staged
        index = slot.point(device, 0, [p.place * step.n + j for p in plan for j in range(step.n)])
        size = len(index)
        places = slot.point(device, 1, [p.place for p in plan])
        gather(staged["aux"][:size], step.hidden, index)
        if step.last is not None:
            gather(staged["last_hidden"][:size], step.last, index)
        for name, values in (("counts", step.accept_lens), ("starts", step.seq_lens)):
            staged[name][: len(plan)].copy_(values.index_select(0, places))
        drawn = step.predict.index_select(0, index)
        for at in range(0, size, _LOGIT_ROWS):
            of = slice(at, min(at + _LOGIT_ROWS, size))
            raw = step.raw[planned_row:][of] if step.raw_planned else step.raw.index_select(0, index[of])
            self._stage_teacher(slot, of, raw, drawn[of])
        sizes = dict.fromkeys(("aux", *_TEACHER), size)
        arrival = device.download(slot.pairs(**sizes, counts=len(plan), starts=len(plan)))
        self.run(self._arrived_verified, slot, plan, step.n, arrival)

    def _prefilled(self, step: PrefillStep) -> None:
        kept = [_kept(step, i) for i in range(len(step.plan))]  # (first position kept, rows of the step)
        rows = [row for _, of in kept for row in of]
        size = self.staging.shape.rows
        slots = self._take(max(1, -(-len(rows) // size)), step.plan)
        if not slots:
            return
        device, pairs = self.staging.device, []
        for order, slot in enumerate(slots):
            part = rows[order * size : (order + 1) * size]
            if part:
                gather(slot.staged["aux"][: len(part)], step.hidden, slot.point(device, 0, part))
                pairs += slot.pairs(aux=len(part))
        if step.raw is not None and step.drawn is not None:
            of = slice(0, len(step.answered))
            self._stage_teacher(slots[0], of, step.raw, step.drawn)
            if step.last is not None and step.answered:
                rows = slots[0].point(device, 1, step.answered_rows())
                gather(slots[0].staged["last_hidden"][of], step.last, rows)
            pairs += slots[0].pairs(**dict.fromkeys(_TEACHER, len(step.answered)))
        arrival = device.download(pairs)
        lengths = [
            (first, len(of), step.starts[i] + step.counts[i] - 1) for i, (first, of) in enumerate(kept)
        ]
        answered = list(step.answered) if step.raw is not None else []
        self.run(self._arrived_prefilled, slots, step.plan, lengths, answered, arrival)

    def _stage_teacher(self, slot: Slot, of: slice, raw: torch.Tensor, drawn: torch.Tensor) -> None:
        for name, values in zip(
            ("ids", "logp", "token_logp"),
            teacher_tensors(raw, self.staging.shape.teacher_k, drawn),
            strict=True,
        ):
            slot.staged[name][of].copy_(values)

    def _take(self, count: int, plan: list[Planned]) -> list[Slot]:
        slots = self.staging.take(count)
        if slots is None:
            for planned in plan:
                planned.sample.lost = True  # no more of it is planned
                self.run(self.capture.drop, planned.sample, FULL)
        return slots or []

    # ---- the other thread ----

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                work()
            except Exception as error:
                logger.exception("capture failed and is off until the server is restarted")
                self._failed(error)

    def _arrived_verified(self, slot: Slot, plan: list[Planned], n: int, arrival: Arrival) -> None:
        try:
            arrival.synchronize()
            counts, starts = slot.host["counts"].tolist(), slot.host["starts"].tolist()
            for order, planned in enumerate(plan):
                of = slice(order * n, order * n + counts[order])
                pos = starts[order]
                self.capture.saw_round(planned.sample, n - 1)
                self._write(planned, pos, slot.aux(of), pos, slot.teacher(of))
        finally:
            self.staging.give([slot])

    def _arrived_prefilled(
        self,
        slots: list[Slot],
        plan: list[Planned],
        lengths: list[tuple[int, int, int]],
        answered: list[int],
        arrival: Arrival,
    ) -> None:
        try:
            arrival.synchronize()
            at = 0
            for i, planned in enumerate(plan):
                first, count, last = lengths[i]
                order = answered.index(i) if i in answered else None
                of = slice(0, 0) if order is None else slice(order, order + 1)
                self._write(planned, first, self._rows(slots, at, count), last, slots[0].teacher(of))
                at += count
        finally:
            self.staging.give(slots)

    def _rows(self, slots: list[Slot], at: int, count: int) -> np.ndarray:
        """Rows at … at+count-1 of those that lie in ``slots`` one after another."""
        size = self.staging.shape.rows
        parts = []
        while count or not parts:
            slot, offset = divmod(at, size)
            take = min(count, size - offset)
            parts.append(slots[min(slot, len(slots) - 1)].aux(slice(offset, offset + take)))
            at, count = at + take, count - take
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _write(
        self, planned: Planned, pos: int, aux: np.ndarray, teacher_pos: int, rows: TeacherRows
    ) -> None:
        if len(aux) or len(planned.tokens):
            self.capture.write(
                planned.sample, pos, aux, teacher_pos, rows, planned.tokens_pos, planned.tokens
            )


def make_staging(shape: Shape) -> Staging:
    """On the device of this process."""
    return Staging(shape, CudaDevice(torch.device("cuda", torch.cuda.current_device())))


def _kept(step: PrefillStep, i: int) -> tuple[int, range]:
    """First position and rows of a planned request in a prefill, without those before its sample's start."""
    start, count, offset = step.starts[i], step.counts[i], step.offsets[i]
    before = min(count, max(0, step.plan[i].sample.start_pos - start))
    return start + before, range(offset + before, offset + count)
