"""Spool segments: append-only files of samples, each tensor with its length and crc32c.

``<id>.open`` is being written; sealing adds a footer, syncs, renames it to ``<id>.seg`` and syncs the folder,
so a ``.seg`` file is whole unless the disk lies. Names sort by time.

Layout: a frame is ``magic, length of its JSON, crc32c of its JSON, bytes of its body``, then the JSON, then
the body. The first frame's JSON is the stream's, each further one a sample's (its tensors in the body), the
last is the footer.
"""

import json
import os
import secrets
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np

from tide_platform.capture.record import TENSORS, Sample, SampleMeta, StreamMeta
from tide_platform.config import TideError

OPEN, SEALED = ".open", ".seg"
_FRAME = struct.Struct("<4sIIQ")
_MAGIC = b"TSEG"
_LIMIT = 1 << 26  # bytes of a frame's JSON: beyond, its header is garbage


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
    """One segment from opening to sealing. A sample that could not be written leaves the file as it was."""

    def __init__(self, folder: Path, stream: StreamMeta):
        self.segment_id = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        self.samples, self.created = 0, time.monotonic()
        self._path = folder / f"{self.segment_id}{OPEN}"
        self._file: BinaryIO = self._path.open("wb", buffering=0)
        self.bytes = 0
        self._write({"segment": self.segment_id, "stream": stream.to_json()}, [])

    def append(self, sample: Sample) -> None:
        """Raises ``OSError`` (disk full); the segment then holds what it held before."""
        arrays = [np.ascontiguousarray(sample.tensors[name]) for name in TENSORS]
        tensors = [
            {"name": name, "shape": array.shape, "length": array.nbytes, "crc32c": crc32c(array)}
            for name, array in zip(TENSORS, arrays, strict=True)
        ]
        self._write({"sample": sample.meta.to_json(), "tensors": tensors}, arrays)
        self.samples += 1

    def seal(self) -> Path:
        """Makes the segment durable and visible to ingest; returns its path."""
        self._write({"footer": self.samples}, [])
        os.fsync(self._file.fileno())
        self._file.close()
        return _rename(self._path)

    def abandon(self) -> None:
        """Removes the file: nothing is in it."""
        self._file.close()
        self._path.unlink()

    def _write(self, head: dict[str, Any], arrays: list[np.ndarray]) -> None:
        frame = _frame(head, arrays)
        try:
            for part in frame:
                view = memoryview(part)
                while view.nbytes:
                    view = view[self._file.write(view) :]
        except OSError:
            self._file.seek(self.bytes)
            self._file.truncate(self.bytes)
            raise
        self.bytes += sum(memoryview(part).nbytes for part in frame)


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
        size = os.fstat(file.fileno()).st_size
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
        if samples:
            file.truncate(whole)
            file.seek(whole)
            if not footer:
                for part in _frame({"footer": samples}, []):
                    file.write(part)
            file.flush()
            os.fsync(file.fileno())
    if not samples:
        path.unlink()
        return Recovered(None, 0, size)
    return Recovered(_rename(path), samples, size - whole)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(path: Path) -> Path:
    sealed = path.rename(path.with_suffix(SEALED))
    sync_folder(path.parent)
    return sealed


def _frame(head: dict[str, Any], arrays: list[np.ndarray]) -> list[Any]:
    encoded = json.dumps(head).encode()
    length = sum(array.nbytes for array in arrays)
    header = _FRAME.pack(_MAGIC, len(encoded), google_crc32c.value(encoded), length)
    return [header + encoded, *(array.reshape(-1).data.cast("B") for array in arrays if array.nbytes)]


def _frames(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    while header := file.read(_FRAME.size):
        offset = file.tell() - len(header)
        if len(header) < _FRAME.size:
            raise CorruptSegment(path, offset, "torn frame")
        magic, length, crc, body_length = _FRAME.unpack(header)
        if magic != _MAGIC or length > _LIMIT:
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
    for of in head["tensors"]:
        part = content[at : at + of["length"]]
        if part.nbytes != of["length"] or crc32c(part) != of["crc32c"]:
            raise CorruptSegment(
                path, offset, f"{of['name']} of {head['sample']['sample_id']}: wrong checksum"
            )
        tensors[of["name"]] = part.view(TENSORS[of["name"]][0]).reshape(of["shape"])
        at += of["length"]
    try:
        return Sample(SampleMeta.from_json(head["sample"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptSegment(path, offset, f"sample of another release ({error})") from error
