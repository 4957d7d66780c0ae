"""Spool segments: append-only files of samples, each tensor with its length and crc32c.

``<id>.open`` is being written; sealing adds a footer, syncs, renames it to ``<id>.seg`` and syncs the folder,
so a ``.seg`` file is whole unless the disk lies. Names sort by time.

Layout: a frame is ``magic, length of its JSON, crc32c of its JSON, bytes of its body``, then the JSON, then
the body. The first frame's JSON is the stream's, each further one a sample's (its tensors in the body, the
aux states first), the last is the footer. Blanks at the end of a JSON let a body begin at a page.
"""

import contextlib
import json
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from tide_platform.capture.disk import PAGE, DirectFile, Disk, written_in_place
from tide_platform.capture.record import KINDS, Sample, SampleMeta, StreamMeta
from tide_platform.config import TideError
from tide_platform.config.files import sync

OPEN, SEALED = ".open", ".seg"
_FRAME = struct.Struct("<4sIIQ")
_MAGIC = b"TSEG"
_LIMIT = 1 << 26  # bytes of a frame's JSON: beyond, its header is garbage
_FOOTER_ROOM = 256  # bytes, and more than enough
_ORDER = ("aux", *(name for name in KINDS if name != "aux"))  # of a frame's body


class CorruptSegment(TideError):
    """A segment whose bytes are not those that were written."""

    def __init__(self, path: Path, offset: int, what: str):
        super().__init__(
            f"{path}: {what} at byte {offset}; its samples cannot be trusted and must not be stored"
        )
        self.path, self.offset, self.what = path, offset, what


def crc32c(array: np.ndarray) -> int:
    """Checksum of the array's bytes in C order; no copy of a contiguous one."""
    return google_crc32c.value(np.ascontiguousarray(array))


@dataclass(frozen=True)
class Recovered:
    """What was found in an ``.open`` file that its writer left behind."""

    path: Path | None  # the sealed segment; None: no whole sample was in it
    samples: int
    cut_bytes: int  # of the torn tail


class SegmentWriter:
    """One segment from opening to sealing. A sample that could not be written leaves the file as it was.

    ``disk`` is shared by a spool's segments; without one, :meth:`seal` waits for a disk of its own.
    ``reserve_bytes`` are taken from the disk at once where it has them. Raises ``OSError`` where there is no
    room at all.
    """

    def __init__(
        self, folder: Path, stream: StreamMeta, disk: Disk | None = None, reserve_bytes: int = 1 << 20
    ):
        self.segment_id = f"{_next_time(folder):020d}-{secrets.token_hex(4)}"
        self.samples, self.created = 0, time.monotonic()
        self.path = folder / f"{self.segment_id}{OPEN}"
        self._disk, self._own = disk or Disk(), disk is None
        self.stream = stream
        frame = _frame({"segment": self.segment_id, "stream": stream.to_json()}, [])
        self._file = DirectFile(self.path, self._disk, reserve_bytes, len(frame) + _FOOTER_ROOM)
        self._file.append(np.frombuffer(frame, np.uint8))

    @property
    def bytes(self) -> int:
        return self._file.length

    @property
    def direct(self) -> bool:
        """Whether the file system takes O_DIRECT."""
        return self._file.direct

    def append(self, sample: Sample, after: Callable[[], None] | None = None) -> None:
        """Raises ``OSError`` (disk full); the segment then holds what it held before. The sample's arrays are
        read until ``after`` is called, by the disk's thread, after the next :meth:`flush` at the latest.
        """
        names = [name for name in _ORDER if name in sample.tensors]
        arrays = {name: np.ascontiguousarray(sample.tensors[name]) for name in names}
        tensors = [
            {
                "name": name,
                "shape": array.shape,
                "length": array.nbytes,
                "crc32c": sample.checksums.get(name) or crc32c(array),
            }
            for name, array in arrays.items()
        ]
        parts = [array.reshape(-1).view(np.uint8) for array in arrays.values()]
        # the first tensor begins at a page then, and the disk takes it from where it lies
        begin = self._file.length if written_in_place(arrays[_ORDER[0]]) else None
        frame = _frame({"sample": sample.meta.to_json(), "tensors": tensors}, parts, begin)
        self._file.reserve(len(frame) + sum(part.nbytes for part in parts) + _FOOTER_ROOM)
        self._file.append(np.frombuffer(frame, np.uint8))
        for part in parts[:-1]:
            self._file.append(part)
        self._file.append(parts[-1], after)
        self.samples += 1

    def flush(self) -> None:
        """Hands what was appended to the disk's thread."""
        self._file.flush()

    def seal_later(self, then: Callable[[Path], None]) -> None:
        """The disk's thread makes the segment durable and visible to ingest, then calls ``then``."""
        self._file.append(np.frombuffer(_frame({"footer": self.samples}, []), np.uint8))
        self._file.seal(lambda: then(_rename(self.path)))

    def seal(self) -> Path:
        """Waits until the segment is sealed; returns its path."""
        paths: list[Path] = []
        self.seal_later(paths.append)
        self._disk.wait()
        if self._own:
            self._disk.close()
        return paths[0]

    def abandon(self) -> None:
        """Removes the file: nothing is in it."""
        self._file.abandon()


def read_segment(path: Path) -> tuple[StreamMeta, list[Sample]]:
    """All samples of a sealed segment, every checksum verified. Raises :class:`CorruptSegment`,
    ``OSError``.
    """
    with path.open("rb") as file:
        frames = _frames(path, file)
        stream, samples = _stream(path, next(frames, None)), []
        for offset, head, body in frames:
            if "footer" in head:
                if head["footer"] != len(samples):
                    raise CorruptSegment(
                        path, offset, f"{len(samples)} samples, the footer counts {head['footer']}"
                    )
                return stream, samples
            samples.append(_sample(path, offset, head, body))
    raise CorruptSegment(path, path.stat().st_size, "no footer")


def recover_segment(path: Path) -> Recovered:
    """Seals an ``.open`` file whose writer died: keeps its whole samples, cuts the torn tail."""
    whole, samples, footer = 0, 0, False
    with path.open("r+b") as file:
        try:
            frames = _frames(path, file)
            _stream(path, next(frames, None))
            whole = file.tell()
            for offset, head, body in frames:
                footer = "footer" in head
                if not footer:
                    _sample(path, offset, head, body)
                    samples += 1
                whole = file.tell()
        except CorruptSegment:
            pass  # whole is where the last good frame ended
        torn = _content(file, whole)
        if samples:
            file.truncate(whole)
            file.seek(whole)
            if not footer:
                file.write(_frame({"footer": samples}, []))
            file.flush()
            os.fsync(file.fileno())
    if not samples:
        path.unlink()
        return Recovered(None, 0, torn)
    return Recovered(_rename(path), samples, torn)


def count_samples(path: Path) -> int:
    """Samples of a sealed segment, by its footer alone. Raises :class:`CorruptSegment`, ``OSError``."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _FOOTER_ROOM))
        tail = file.read()
    at = tail.rfind(_MAGIC)
    if at >= 0 and len(tail) - at > _FRAME.size:
        _, length, crc, body = _FRAME.unpack_from(tail, at)
        encoded = tail[at + _FRAME.size :]
        if body == 0 and len(encoded) == length and google_crc32c.value(encoded) == crc:
            return int(json.loads(encoded)["footer"])
    raise CorruptSegment(path, size, "no footer")


def _content(file: BinaryIO, at: int) -> int:
    """Bytes from ``at`` to the last one that is not zero: reserved space is empty."""
    file.seek(at)
    last, offset = 0, 0
    while block := file.read(1 << 20):
        if kept := block.rstrip(b"\0"):
            last = offset + len(kept)
        offset += len(block)
    return last


def _next_time(folder: Path) -> int:
    """Nanoseconds, later than any name there: the oldest is ingested, or given up, first, and a clock may go
    back.
    """
    names = [path.name[:20] for path in folder.iterdir() if path.suffix in (OPEN, SEALED)]
    return max(time.time_ns(), 1 + max((int(name) for name in names if name.isdigit()), default=0))


def _rename(path: Path) -> Path:
    sealed = path.with_suffix(SEALED)
    with contextlib.suppress(FileNotFoundError):  # renamed before, when the folder's sync is tried again
        path.rename(sealed)
    sync(path.parent)
    return sealed


def _frame(head: dict[str, Any], body: list[np.ndarray], at: int | None = None) -> bytes:
    """Header and JSON of a frame whose body follows; at file offset ``at``, padded so that the body begins at
    a page.
    """
    encoded = json.dumps(head).encode()
    if at is not None:
        encoded += b" " * (-(at + _FRAME.size + len(encoded)) % PAGE)
    length = sum(part.nbytes for part in body)
    return _FRAME.pack(_MAGIC, len(encoded), google_crc32c.value(encoded), length) + encoded


def _frames(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    while header := file.read(_FRAME.size):
        offset = file.tell() - len(header)
        if len(header) < _FRAME.size:
            raise CorruptSegment(path, offset, "torn frame")
        magic, length, crc, body_length = _FRAME.unpack(header)
        if magic != _MAGIC or not 0 < length <= _LIMIT:
            raise CorruptSegment(path, offset, "no frame")
        encoded = file.read(length)
        if len(encoded) < length or google_crc32c.value(encoded) != crc:
            raise CorruptSegment(path, offset, "frame with a wrong checksum")
        # the length is no part of the checksum: a flipped bit in it must not be believed with memory
        if body_length > os.fstat(file.fileno()).st_size - file.tell():
            raise CorruptSegment(path, offset, "torn frame")
        yield offset, json.loads(encoded), file.read(body_length)


def _stream(path: Path, frame: tuple[int, dict[str, Any], bytes] | None) -> StreamMeta:
    if frame is None or "stream" not in frame[1]:
        raise CorruptSegment(path, 0, "no stream header")
    try:
        return StreamMeta.from_json(frame[1]["stream"])
    except (KeyError, TypeError) as error:
        raise CorruptSegment(path, 0, f"stream header of another release ({error})") from error


def _sample(path: Path, offset: int, head: dict[str, Any], body: bytes) -> Sample:
    tensors, at, content = {}, 0, np.frombuffer(body, np.uint8)
    try:
        meta = SampleMeta.from_json(head["sample"])
        for of in head["tensors"]:
            part = content[at : at + of["length"]]
            if part.nbytes != of["length"] or crc32c(part) != of["crc32c"]:
                raise CorruptSegment(path, offset, f"{of['name']} of {meta.sample_id}: wrong checksum")
            packed = of["name"] == "aux" and meta.aux_format != "bf16"
            dtype = np.uint8 if packed else KINDS[of["name"]][0]
            array = part.view(dtype).reshape(of["shape"])
            tensors[of["name"]] = array if array.flags.aligned else array.copy()
            at += of["length"]
        return Sample(meta, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptSegment(path, offset, f"sample of another release ({error})") from error
