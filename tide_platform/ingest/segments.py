"""The spool folder as one of several workers sees it: claims, due batches, what is set aside."""

import json
import logging
import time
from pathlib import Path
from typing import BinaryIO

from tide_platform.capture.folder import claim, make_folder, sealed_segments, size_of
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.segment import CorruptSegment, read_segment
from tide_platform.config.files import sync
from tide_platform.config.schema import Ingest as Limits
from tide_platform.ingest.counts import Counts

log = logging.getLogger("tide.ingest")
CORRUPT, REFUSED = ".bad", ".refused"


class Segments:
    """Claims are locks on the files: they end with the process, however that ends."""

    def __init__(self, folder: Path, limits: Limits, counts: Counts):
        make_folder(folder)
        self._folder, self._limits, self._counts = folder, limits, counts
        self._claims: dict[Path, BinaryIO] = {}
        self._first_seen: dict[Path, float] = {}  # monotonic: the wall clock may go back

    def waiting(self) -> list[Path]:
        """Sealed segments that this worker has not claimed, oldest first."""
        return [path for path in sealed_segments(self._folder) if path not in self._claims]

    def take(self, at_once: bool = False) -> list[Path]:
        """Claims the oldest segments, up to ``commit_bytes``: what is held in memory at a time. Empty while
        neither enough bytes wait nor the oldest has waited long enough: a commit costs a version and a
        fragment for ever.
        """
        waiting = self.waiting()
        now = time.monotonic()
        self._first_seen = {path: self._first_seen.get(path, now) for path in waiting}
        sizes = {path: size for path in waiting if (size := size_of(path)) is not None}
        if not sizes:
            return []
        age = now - min(self._first_seen[path] for path in sizes)
        due = age >= self._limits.commit_seconds or sum(sizes.values()) >= self._limits.commit_bytes
        if not (due or at_once):
            return []
        total, batch = 0, []
        for path, size in sizes.items():
            if batch and total + size > self._limits.commit_bytes:
                break
            if self._claim(path):
                total += size
                batch.append(path)
        return batch

    def read(self, paths: list[Path]) -> list[tuple[StreamMeta, dict[Path, list[Sample]]]]:
        """The segments by stream, every checksum verified; those that are corrupt are set aside."""
        groups: dict[StreamMeta, dict[Path, list[Sample]]] = {}
        for path in paths:
            try:
                stream, samples = read_segment(path)
            except FileNotFoundError:  # the spool's disk budget: the oldest go first, and it counts them
                self._counts.gone += 1
                self._unclaim(path)
                continue
            except CorruptSegment as error:
                self._counts.corrupt += 1
                self.set_aside(path, CORRUPT, str(error))
                continue
            groups.setdefault(stream, {})[path] = samples
        return list(groups.items())

    def set_aside(self, path: Path, suffix: str, why: str) -> None:
        """Keeps the file under another name, with a report beside it."""
        aside = path.with_suffix(suffix)
        report = {"segment": path.name, "why": why, "bytes": size_of(path)}
        aside.with_name(f"{aside.name}.json").write_text(json.dumps(report, indent=1))
        if path.exists():
            path.rename(aside)
        sync(path.parent)
        self._unclaim(path)
        log.error("%s; kept as %s", why, aside.name)

    def delete(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            self._unclaim(path)
        if paths:
            sync(self._folder)

    def give_back(self) -> None:
        """Ends all claims; their segments wait again."""
        for path in list(self._claims):
            self._unclaim(path)

    def _claim(self, path: Path) -> bool:
        file = claim(path)
        if file is None:
            return False
        self._claims[path] = file
        return True

    def _unclaim(self, path: Path) -> None:
        if file := self._claims.pop(path, None):
            file.close()
