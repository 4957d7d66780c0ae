"""Puts the records of interleaved requests together into samples.

A request is whole only if each of its records was seen, from the first (``seq`` 0) on; every other request is
dropped and counted, so a sample with a part missing is never stored as whole. Holes that the *server* left
(prefix-cache hits) are no missing parts: they show in ``row_pos`` and ``teacher_pos``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tide_platform.capture.reader import Record
from tide_platform.capture.record import Sample, SampleMeta, StreamMeta
from tide_platform.capture.ring import Kind


@dataclass
class _Request:
    next_seq: int = 0
    bytes: int = 0
    row_pos: list[np.ndarray] = field(default_factory=list)
    aux: list[np.ndarray] = field(default_factory=list)
    teacher_pos: list[np.ndarray] = field(default_factory=list)
    teacher_ids: list[np.ndarray] = field(default_factory=list)
    teacher_logp: list[np.ndarray] = field(default_factory=list)
    token_logp: list[np.ndarray] = field(default_factory=list)


class Assembler:
    """Memory of the requests in flight, ``memory_bytes`` of it at most: beyond, the largest request is
    dropped.

    ``max_tokens``: a longer sample leaves as stretches of that length, ``<sample_id>.0``, ``.1``, …, flagged
    ``stretch``; the whole request's ``verify_rounds`` and ``accepted_drafts`` stand on the first, so that
    sums stay right.
    """

    def __init__(self, stream: StreamMeta, max_tokens: int, memory_bytes: int = 1 << 30):
        self.dropped: dict[str, int] = {}
        self._stream, self._max_tokens, self._memory_bytes = stream, max_tokens, memory_bytes
        self._requests: dict[int, _Request] = {}
        self._ignored: set[int] = set()  # dropped here, more of its records to come
        self._bytes = 0

    def count(self, reason: str, samples: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + samples

    def drop_all(self, reason: str) -> None:
        """Gives up every request in flight: the server that would have finished them is gone."""
        if self._requests:
            self.count(reason, len(self._requests))
        self._requests.clear()
        self._ignored.clear()
        self._bytes = 0

    def take(self, record: Record) -> list[Sample]:
        """Copies what ``record`` holds; returns the samples that it completes, none for most records."""
        last = record.kind in (Kind.FINISH, Kind.DISCARD)
        if record.serial in self._ignored:
            if last:
                self._ignored.discard(record.serial)
            return []
        request = self._requests.get(record.serial)
        if record.seq != (request.next_seq if request else 0):
            # the start of it was in the memory of a spool that died, or in a record that was skipped
            self._forget(record.serial)
            self.count("spool_restarted")
            if not last:
                self._ignored.add(record.serial)
            return []
        if record.kind == Kind.DISCARD:
            self._forget(record.serial)  # counted by the server, which knows why
            return []
        if record.kind == Kind.FINISH:
            self._forget(record.serial)
            return self._finish(request, record)
        self._add(request or self._requests.setdefault(record.serial, _Request()), record)
        self._bound()
        return []

    def _add(self, request: _Request, record: Record) -> None:
        request.next_seq = record.seq + 1
        assert record.aux is not None and record.token_logp is not None
        assert record.teacher_ids is not None and record.teacher_logp is not None
        before = request.bytes
        if rows := len(record.aux):
            request.row_pos.append(np.arange(record.pos, record.pos + rows, dtype=np.int32))
            request.aux.append(record.aux.copy())
            request.bytes += record.aux.nbytes
        if rows := len(record.token_logp):
            request.teacher_pos.append(
                np.arange(record.teacher_pos, record.teacher_pos + rows, dtype=np.int32)
            )
            request.teacher_ids.append(record.teacher_ids.copy())
            request.teacher_logp.append(record.teacher_logp.copy())
            request.token_logp.append(record.token_logp.copy())
            request.bytes += record.teacher_ids.nbytes + record.teacher_logp.nbytes
        self._bytes += request.bytes - before

    def _bound(self) -> None:
        while self._bytes > self._memory_bytes:
            serial = max(self._requests, key=lambda key: self._requests[key].bytes)
            self._forget(serial)
            self._ignored.add(serial)
            self.count("spool_memory")

    def _forget(self, serial: int) -> None:
        request = self._requests.pop(serial, None)
        if request:
            self._bytes -= request.bytes

    def _finish(self, request: _Request | None, record: Record) -> list[Sample]:
        assert record.meta is not None and record.input_ids is not None
        meta = replace(record.meta, num_tokens=len(record.input_ids))
        if request is None or not request.aux or not meta.num_tokens:
            self.count("no_rows")
            return []
        whole = _sample(self._stream, meta, request, record.input_ids.copy())
        samples = [part for part in _stretches(whole, self._max_tokens) if len(part.tensors["row_pos"])]
        if not samples:
            self.count("no_rows")
        return samples


def _sample(stream: StreamMeta, meta: SampleMeta, request: _Request, input_ids: np.ndarray) -> Sample:
    """The rows of positions start_pos … start_pos+T-1, ascending; the last one written of a position wins."""
    k, end = stream.teacher_k, meta.start_pos + len(input_ids)
    row_pos, rows = _latest(request.row_pos, meta.start_pos, end)
    teacher_pos, teachers = _latest(request.teacher_pos, meta.start_pos, end)
    token_logp = _gather(request.token_logp, teachers, (0,), np.float16)
    # the token after the last one was emitted past the stop: nobody saw it
    token_logp[teacher_pos + 1 >= end] = np.nan
    return Sample(
        meta,
        {
            "input_ids": input_ids,
            "row_pos": row_pos,
            "aux": _gather(request.aux, rows, (0, 3 * stream.hidden_size), np.uint16),
            "teacher_pos": teacher_pos,
            "teacher_ids": _gather(request.teacher_ids, teachers, (0, k), np.int32),
            "teacher_logp": _gather(request.teacher_logp, teachers, (0, k), np.float16),
            "token_logp": token_logp,
        },
    )


def _latest(positions: list[np.ndarray], start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions in [start, end), ascending, and for each the index of its last occurrence."""
    if not positions:
        return np.zeros(0, np.int32), np.zeros(0, np.int64)
    joined = np.concatenate(positions)
    unique, first_of_reversed = np.unique(joined[::-1], return_index=True)
    kept = (unique >= start) & (unique < end)
    return unique[kept], len(joined) - 1 - first_of_reversed[kept]


def _gather(parts: list[np.ndarray], indices: np.ndarray, empty: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.concatenate(parts)[indices] if parts else np.zeros(empty, dtype)


def _stretches(sample: Sample, max_tokens: int) -> Iterator[Sample]:
    meta, tensors = sample.meta, sample.tensors
    if meta.num_tokens <= max_tokens:
        yield sample
        return
    for number, offset in enumerate(range(0, meta.num_tokens, max_tokens)):
        start, tokens = meta.start_pos + offset, tensors["input_ids"][offset : offset + max_tokens]
        part = {"input_ids": tokens}
        for positions, names in (
            ("row_pos", ("row_pos", "aux")),
            ("teacher_pos", ("teacher_pos", "teacher_ids", "teacher_logp", "token_logp")),
        ):
            first, last = np.searchsorted(tensors[positions], (start, start + len(tokens)))
            part |= {name: tensors[name][first:last] for name in names}
        yield Sample(
            replace(
                meta,
                sample_id=f"{meta.sample_id}.{number}",
                start_pos=start,
                num_tokens=len(tokens),
                verify_rounds=0 if number else meta.verify_rounds,
                accepted_drafts=0 if number else meta.accepted_drafts,
                flags=(*meta.flags, "stretch"),
            ),
            part,
        )
