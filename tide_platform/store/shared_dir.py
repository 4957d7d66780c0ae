"""A :class:`FeatureStore` in a folder that several machines mount: no server, not durable by promise.

Layout: ``batches/<batch>.json`` names the objects of a put and is written last, so a put is seen whole or not
at all; ``objects/<sample>/g<generation>.bin`` holds one sample, a JSON head with lengths and crc32c and then
the tensors, placed by an atomic rename; ``gone/<sample>.g<generation>`` marks what was released or aborted.
The keys are those of an object pool (sample and generation), so a backend in memory takes the same ones.
"""

import hashlib
import json
import os
import secrets
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from tide_platform.capture.packing import unpack
from tide_platform.capture.record import KINDS, Sample, SampleMeta
from tide_platform.capture.segment import crc32c
from tide_platform.store.errors import (
    BlobCorrupt,
    BudgetExceeded,
    SampleReleased,
    SamplesMissing,
    StaleGeneration,
    StoreUnavailable,
)
from tide_platform.store.feature_store import Health, Key

_HEAD = struct.Struct("<4sIIQ")  # magic, length and crc32c of the JSON, bytes of the tensors
_MAGIC = b"TFSO"
_TORN_SECONDS = 3600.0  # what no batch names after so long is a dead writer's


class SharedDirFeatureStore:
    """``features``: 3H, to unpack aux states that came packed."""

    def __init__(
        self,
        root: Path,
        features: int,
        budget_bytes: int | None = None,
        torn_seconds: float = _TORN_SECONDS,
    ):
        self._root, self._features = root, features
        self._budget, self._torn = budget_bytes, torn_seconds
        self._batches, self._objects, self._gone = root / "batches", root / "objects", root / "gone"
        with self._errors():
            for folder in (self._batches, self._objects, self._gone):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, samples: Sequence[Sample], batch_id: str) -> list[Key]:
        with self._errors():
            encoded = [_encode(sample) for sample in samples]
            if self._budget is not None:
                wanted, used = sum(map(len, encoded)), self._used()
                if used + wanted > self._budget:
                    raise BudgetExceeded(str(self._root), wanted, used, self._budget)
            keys = []
            for sample, content in zip(samples, encoded, strict=True):
                name = sample.meta.sample_id
                key = Key(name, max(time.time_ns(), self._newest(name) + 1))
                _place(self._path(key), content)
                keys.append(key)
            names = [[key.sample_id, key.generation] for key in keys]
            _place(self._batch(batch_id), json.dumps(names).encode())
            return keys

    def get(self, keys: Sequence[Key]) -> Iterator[Sample]:
        uri = str(self._root)
        with self._errors():
            if gone := [key.sample_id for key in keys if self._mark(key).exists()]:
                raise SampleReleased(uri, gone)
            visible = self._visible()
            for key in keys:
                current = visible.get(key.sample_id)
                if current is None:
                    raise SamplesMissing(uri, [key.sample_id])
                if current != key.generation:
                    raise StaleGeneration(uri, key.sample_id, key.generation, current)
        for key in keys:
            with self._errors():
                try:
                    content = self._path(key).read_bytes()
                except FileNotFoundError as error:
                    raise SamplesMissing(uri, [key.sample_id]) from error
                yield unpack(self._decode(key, content), self._features)

    def release(self, keys: Sequence[Key]) -> None:
        with self._errors():
            for key in keys:
                self._mark(key).touch()
                self._path(key).unlink(missing_ok=True)

    def abort(self, batch_id: str) -> None:
        with self._errors():
            path = self._batch(batch_id)
            if path.exists():
                self.release([Key(*each) for each in json.loads(path.read_bytes())])
                path.unlink()

    def gc(self) -> int:
        """Objects that no batch names and that are old, replaced generations, and batches without objects."""
        freed, now = 0, time.time()
        with self._errors():
            visible = self._visible()
            for path in self._objects.glob("*/g*"):
                stat = path.stat()
                content = path.name.removesuffix(".bin").removeprefix("g")
                current = visible.get(_unquote(path.parent))
                is_current = current is not None and content == str(current)
                replaced = current is not None and content.isdecimal() and int(content) < current
                if not is_current and (replaced or now - stat.st_mtime > self._torn):
                    freed += stat.st_size
                    path.unlink(missing_ok=True)
            for path in self._batches.glob("*.json"):
                keys = [Key(*each) for each in json.loads(path.read_bytes())]
                if not any(self._path(key).exists() for key in keys):
                    path.unlink(missing_ok=True)
        return freed

    def health(self) -> Health:
        try:
            with self._errors():
                used, free = self._used(), shutil.disk_usage(self._root).free
                samples = len(self._visible())
        except StoreUnavailable as error:
            return Health(False, str(error), 0, self._budget)
        return Health(True, f"{samples} samples, {free} bytes free on the disk", used, self._budget)

    def _decode(self, key: Key, content: bytes) -> Sample:
        def torn(column: str) -> BlobCorrupt:
            return BlobCorrupt(str(self._root), key.sample_id, column)

        if len(content) < _HEAD.size:
            raise torn("its head")
        magic, length, crc, body = _HEAD.unpack_from(content)
        head = content[_HEAD.size : _HEAD.size + length]
        at = _HEAD.size + length
        if magic != _MAGIC or len(content) != at + body or google_crc32c.value(head) != crc:
            raise torn("its head")
        raw: dict[str, Any] = json.loads(head)
        tensors = {}
        for of in raw["tensors"]:
            part = content[at : at + of["length"]]
            if google_crc32c.value(part) != of["crc32c"]:
                raise torn(of["name"])
            tensors[of["name"]] = np.frombuffer(part, of["dtype"]).reshape(of["shape"])
            at += of["length"]
        sample = Sample(SampleMeta.from_json(raw["meta"]), tensors)
        if sample.meta.sample_id != key.sample_id:
            raise torn("its name")
        return sample

    def _visible(self) -> dict[str, int]:
        """Sample id -> newest generation that a batch names."""
        found: dict[str, int] = {}
        for path in self._batches.glob("*.json"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # aborted since
                continue
            for sample_id, generation in json.loads(content):
                found[sample_id] = max(generation, found.get(sample_id, 0))
        return found

    def _newest(self, sample_id: str) -> int:
        folder = self._objects / _quote(sample_id)
        return max((int(path.stem[1:]) for path in folder.glob("g*.bin")), default=0)

    def _used(self) -> int:
        return sum(path.stat().st_size for path in self._objects.glob("*/g*.bin"))

    def _path(self, key: Key) -> Path:
        return self._objects / _quote(key.sample_id) / f"g{key.generation}.bin"

    def _mark(self, key: Key) -> Path:
        return self._gone / f"{_quote(key.sample_id)}.g{key.generation}"

    def _batch(self, batch_id: str) -> Path:
        return self._batches / f"{hashlib.sha256(batch_id.encode()).hexdigest()[:32]}.json"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(str(self._root), error.strerror or str(error)) from error


def _encode(sample: Sample) -> bytes:
    arrays = {name: np.ascontiguousarray(sample.tensors[name]) for name in KINDS if name in sample.tensors}
    tensors = [
        {
            "name": name,
            "dtype": array.dtype.str,
            "shape": array.shape,
            "length": array.nbytes,
            "crc32c": crc32c(array),
        }
        for name, array in arrays.items()
    ]
    head = json.dumps({"meta": sample.meta.to_json(), "tensors": tensors}).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    return _HEAD.pack(_MAGIC, len(head), google_crc32c.value(head), len(body)) + head + body


def _place(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def _quote(sample_id: str) -> str:
    """A file name that no sample id can break out of."""
    return sample_id.encode().hex()


def _unquote(folder: Path) -> str:
    return bytes.fromhex(folder.name).decode()
