"""Puts the records of interleaved requests together into samples, while the requests run.

A request is whole only if each of its records was seen, from the first (``seq`` 0) on; every other request is
dropped and counted, so a sample with a part missing is never stored as whole. Holes that the *server* left
(prefix-cache hits) are no missing parts: they show in ``row_pos`` and ``teacher_pos``.

Shapes: L tokens of a stretch, T of a sample.
"""

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np

from tide_platform.capture.buffers import Buffer, Pool
from tide_platform.capture.reader import Record
from tide_platform.capture.record import OPTIONAL, Sample, SampleMeta, StreamMeta
from tide_platform.capture.ring import Kind

_KEEP_BYTES = 128 << 20  # of free buffers


@dataclass
class _Stretch:
    """Rows and teacher rows of L positions; which of them there are."""

    buffer: Buffer
    has_row: np.ndarray  # bool [L]
    has_teacher: np.ndarray  # bool [L]
    lowest: int  # index of the first row that is there, L: none
    crcs: list[tuple[int, int]]  # crc32c of the rows from ``lowest`` to an index, while they come in order


@dataclass
class _Request:
    meta: SampleMeta
    tokens: np.ndarray  # int32, room for tokens from position ``base`` on
    base: int  # position where the current stretch begins
    given: int  # position behind the last confirmed token
    next_seq: int = 1
    bytes: int = 0  # of it, as counted
    number: int = 0  # of the current stretch
    left: bool = False  # a stretch of it has left
    flags: tuple[str, ...] = ()  # from begin and update
    stretches: dict[int, _Stretch] = field(default_factory=dict)  # by number, current and later ones


class Assembler:
    """Memory of the requests in flight, ``memory_bytes`` of it at most: beyond, the largest request is
    dropped.

    A request of more than ``max_tokens`` tokens leaves as stretches of that length, ``<sample_id>.0``,
    ``.1``, …, flagged ``stretch``, each as soon as confirmed tokens cover it and a row behind it shows that
    it is not the last. The last one carries the request's ``verify_rounds`` and ``accepted_drafts`` and how
    it ended.
    """

    def __init__(
        self,
        stream: StreamMeta,
        max_tokens: int,
        memory_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.time,
    ):
        self.dropped: dict[str, int] = {}
        self.gaps = 0  # requests whose first records were not seen
        self._stream, self._length, self._memory_bytes, self._clock = stream, max_tokens, memory_bytes, clock
        optional = tuple(name for name in OPTIONAL if name in stream.tensors)
        self._teacher = ("teacher_ids", "teacher_logp", "token_logp", *optional)  # a row a teacher row
        self._requests: dict[int, _Request] = {}
        # dropped here, more of its records to come -> why; counted at its end, unless the server discards it
        # and counts it itself; "" where it is counted already
        self._ignored: dict[int, str] = {}
        self._live = 0  # bytes of the requests in flight
        self._pool = Pool(stream, max_tokens, min(_KEEP_BYTES, memory_bytes))
        self._taken: dict[str, Buffer] = {}  # by sample id: samples that left and are still read
        self._gap = "spool_restarted"  # why a request's start may be missing

    @property
    def in_flight(self) -> int:
        """Requests that have begun and not ended, and are not counted as dropped."""
        return len(self._requests) + sum(map(bool, self._ignored.values()))

    @property
    def bytes(self) -> int:
        """Bytes of memory held: requests in flight, samples not yet released, free buffers."""
        return self._live + sum(buffer.bytes for buffer in self._taken.values()) + self._pool.bytes

    def count(self, reason: str, samples: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + samples

    def drop_all(self, reason: str) -> None:
        """Gives up every request in flight; what still comes of them is ignored."""
        for serial in list(self._requests):
            self._forget(serial)
            self._ignored[serial] = reason
        for serial, why in self._ignored.items():
            if why:
                self.count(why)
                self._ignored[serial] = ""
        self._gap = reason

    def take(self, record: Record) -> list[Sample]:
        """Copies what ``record`` holds; returns the samples that it completes, none for most records.

        A sample's arrays may lie in memory that is used again after :meth:`release` of its id.
        """
        last = record.kind in (Kind.FINISH, Kind.DISCARD)
        serial, request = record.serial, self._requests.get(record.serial)
        if serial in self._ignored:
            if last:
                self._count_ignored(serial, record.kind)
            return []
        if record.seq != (request.next_seq if request else 0):
            # the start of it was in the memory of a spool that died, or in a record that was skipped
            self._forget(serial)
            self.gaps += request is None
            self._ignored[serial] = self._gap
            if last:
                self._count_ignored(serial, record.kind)
            return []
        if request is None:
            assert record.kind == Kind.BEGIN
            meta = SampleMeta.from_json(record.content)
            room = np.zeros(min(self._length, 1024), np.int32)
            self._requests[serial] = _Request(
                meta, room, meta.start_pos, meta.start_pos, flags=tuple(meta.flags)
            )
            return []
        request.next_seq = record.seq + 1
        if record.kind == Kind.DISCARD:
            self._forget(serial)  # counted by the server, which knows why
            return []
        if record.kind == Kind.UPDATE:
            self._update(request, record.content)
            return []
        self._tokens(request, record.tokens_pos, record.tokens)
        if record.kind == Kind.FINISH:
            return self._finish(serial, request, record)
        self._rows(request, record)
        samples = self._leave(request)
        self._bound(request)
        return samples

    def release(self, sample_id: str) -> None:
        """The sample's arrays are read no more."""
        buffer = self._taken.pop(sample_id, None)
        if buffer:
            self._pool.give(buffer)

    def _update(self, request: _Request, changed: dict[str, Any]) -> None:
        flags = changed.pop("flags", ())
        request.flags = tuple(dict.fromkeys((*request.flags, *flags)))
        request.meta = replace(request.meta, **changed)

    def _tokens(self, request: _Request, pos: int, tokens: np.ndarray) -> None:
        cut = max(0, request.base - pos)  # a stretch that has left is as it is
        first, last = pos + cut - request.base, pos + len(tokens) - request.base
        if last > len(request.tokens):
            room = np.zeros(max(last, 2 * len(request.tokens)), np.int32)
            room[: len(request.tokens)] = request.tokens
            request.tokens = room
        if last > first:
            request.tokens[first:last] = tokens[cut:]
        if len(tokens):
            request.given = max(request.base, pos + len(tokens))

    def _rows(self, request: _Request, record: Record) -> None:
        for number, of, at in self._split(request, record.pos, len(record.aux)):
            stretch = self._stretch(request, number)
            _add_rows(stretch, record.aux[of], at)
            stretch.buffer.touch(at.stop, 0)
        for number, of, at in self._split(request, record.teacher_pos, len(record.token_logp)):
            stretch = self._stretch(request, number)
            for name in self._teacher:
                stretch.buffer.arrays[name][at] = getattr(record, name)[of]
            stretch.has_teacher[at] = True
            stretch.buffer.touch(0, at.stop)

    def _split(self, request: _Request, pos: int, rows: int) -> list[tuple[int, slice, slice]]:
        """Which rows belong to which stretch, at which index of it; a stretch that left gets none."""
        parts = []
        at = max(pos, request.base)
        while at < pos + rows:
            number, offset = divmod(at - request.base, self._length)
            count = min(self._length - offset, pos + rows - at)
            of = slice(at - pos, at - pos + count)
            parts.append((request.number + number, of, slice(offset, offset + count)))
            at += count
        return parts

    def _stretch(self, request: _Request, number: int) -> _Stretch:
        found = request.stretches.get(number)
        if found is None:
            masks = np.zeros((2, self._length), bool)
            found = _Stretch(self._pool.take(), masks[0], masks[1], self._length, [])
            request.stretches[number] = found
        return found

    def _leave(self, request: _Request) -> list[Sample]:
        """Stretches that are covered by tokens and are not the last one with rows."""
        samples, length = [], self._length
        while self._more_rows(request):
            meta = replace(
                request.meta,
                captured_at=self._clock(),
                verify_rounds=0,
                accepted_drafts=0,
                finish_reason="continues",
            )
            samples += self._cut(request, meta, length)
            request.tokens = request.tokens[length:].copy()
            request.base += length
            request.number += 1
            request.left = True
        return samples

    def _more_rows(self, request: _Request) -> bool:
        """Whether a row lies behind the current stretch and below the confirmed tokens."""
        return any(
            request.base + (number - request.number) * self._length + stretch.lowest < request.given
            for number, stretch in request.stretches.items()
            if number > request.number
        )

    def _finish(self, serial: int, request: _Request, record: Record) -> list[Sample]:
        request.given = end = max(request.base, record.tokens_pos + len(record.tokens))
        final = SampleMeta.from_json(record.content)
        request.flags = tuple(dict.fromkeys((*final.flags, *request.flags)))
        samples = self._leave(request)
        if end - request.base > self._length:  # no row behind the current stretch
            request.left = True
        count = min(end - request.base, self._length)
        stretch = request.stretches.get(request.number)
        if stretch:
            # the token after the last one was emitted past the stop: nobody saw it
            stretch.buffer.arrays["token_logp"][max(0, end - request.base - 1) : count] = np.nan
        last = self._cut(request, final, count) if count > 0 else []
        self._forget(serial)
        if not last:
            self.count("no_rows")
        return samples + last

    def _cut(self, request: _Request, meta: SampleMeta, count: int) -> list[Sample]:
        """The first ``count`` tokens of the current stretch; nothing where none of them has a row."""
        stretch = request.stretches.pop(request.number, None)
        if stretch is None:
            return []
        if stretch.lowest >= count:
            self._pool.give(stretch.buffer)
            return []
        arrays = stretch.buffer.arrays
        tensors = {"input_ids": request.tokens[:count].copy()}
        for mask, names in (
            (stretch.has_row, ("row_pos", "aux")),
            (stretch.has_teacher, ("teacher_pos", *self._teacher)),
        ):
            at, of = _indices(mask[:count])
            tensors[names[0]] = (request.base + at).astype(np.int32)
            tensors |= {name: arrays[name][of] for name in names[1:]}
        parted = request.left or meta.finish_reason == "continues"
        sample_id = f"{meta.sample_id}.{request.number}" if parted else meta.sample_id
        flags = tuple(dict.fromkeys((*request.flags, "stretch"))) if parted else request.flags
        meta = replace(meta, sample_id=sample_id, start_pos=request.base, num_tokens=count, flags=flags)
        self._taken[sample_id] = stretch.buffer
        checksum = _rows_crc(stretch, int(tensors["row_pos"][-1]) + 1 - request.base)
        return [Sample(meta, tensors, {} if checksum is None else {"aux": checksum})]

    def _bound(self, grown: _Request) -> None:
        before, grown.bytes = grown.bytes, _bytes(grown)
        self._live += grown.bytes - before
        while self._requests and self._live > self._memory_bytes:
            serial = max(self._requests, key=lambda key: self._requests[key].bytes)
            self._forget(serial)
            self._ignored[serial] = "spool_memory"

    def _count_ignored(self, serial: int, last: Kind) -> None:
        reason = self._ignored.pop(serial)
        if reason and last == Kind.FINISH:
            self.count(reason)

    def _forget(self, serial: int) -> None:
        request = self._requests.pop(serial, None)
        if request:
            self._live -= request.bytes
            for stretch in request.stretches.values():
                self._pool.give(stretch.buffer)


def _add_rows(stretch: _Stretch, aux: np.ndarray, at: slice) -> None:
    """Copies the rows; their checksum is taken while they are in the processor's cache."""
    rows = stretch.buffer.arrays["aux"]
    rows[at] = aux
    stretch.has_row[at] = True
    if not stretch.crcs:
        stretch.crcs.append((at.stop, google_crc32c.value(rows[at])))
    elif stretch.crcs and stretch.crcs[-1][0] == at.start:
        stretch.crcs.append((at.stop, google_crc32c.extend(stretch.crcs[-1][1], rows[at])))
    else:  # a hole, or rows written again
        stretch.crcs.append((-1, 0))
    stretch.lowest = min(stretch.lowest, at.start)


def _rows_crc(stretch: _Stretch, end: int) -> int | None:
    """Of the rows below index ``end``; ``None`` where they did not come in order."""
    if stretch.crcs[-1][0] < 0:
        return None
    at = bisect.bisect_right(stretch.crcs, end, key=lambda entry: entry[0]) - 1
    if at < 0:
        return None
    before, crc = stretch.crcs[at]
    return google_crc32c.extend(crc, stretch.buffer.arrays["aux"][before:end]) if before < end else crc


def _bytes(request: _Request) -> int:
    return request.tokens.nbytes + sum(stretch.buffer.bytes for stretch in request.stretches.values())


def _indices(mask: np.ndarray) -> tuple[np.ndarray, slice | np.ndarray]:
    """Indices that are set, and what selects them: a slice, which copies nothing, where they are adjacent."""
    at = np.flatnonzero(mask)
    if len(at) and at[-1] - at[0] + 1 == len(at):
        return at, slice(int(at[0]), int(at[-1]) + 1)
    return at, at
