"""Prepared files: token ids with their mask, one record a line, and a header beside them that says for whom.

``NAME`` holds lines ``{"id", "input_ids", "loss_mask"}``; ``NAME.header.json`` is written last, so a file
without one was never finished.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tide_platform.config.files import write_json
from tide_platform.corpus.errors import CorpusUnreadable, NotPrepared, OtherTarget
from tide_platform.corpus.masking import spans_of

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Header:
    """What a prepared file was made from, and for which target."""

    source: str
    source_format: str
    target_digest: str
    tokenizer_digest: str
    template_digest: str
    vocab_size: int  # of the target
    turns: str  # all | last
    max_length: int  # tokens; longer records were cut there
    created_at: float  # Unix time, seconds
    counts: dict[str, Any]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Example:
    """One record: T tokens, and its answers."""

    id: str
    input_ids: np.ndarray  # int64 [T]
    mask: np.ndarray  # bool [T]

    @property
    def answers(self) -> list[tuple[int, int]]:
        """[S, E) of each, in tokens."""
        return spans_of(self.mask)


def header_path(path: Path) -> Path:
    return path.with_name(path.name + ".header.json")


class PreparedWriter:
    """Writes beside ``path`` and replaces it as a whole in :meth:`finish`; anything else leaves it alone."""

    def __init__(self, path: Path):
        self.path = path
        self._work = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> "PreparedWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._work.open("w", encoding="utf-8")
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._work.unlink(missing_ok=True)

    def write(self, name: str, input_ids: np.ndarray, mask: np.ndarray) -> None:
        line = {"id": name, "input_ids": input_ids.tolist(), "loss_mask": mask.astype(int).tolist()}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def finish(self, header: Header) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        header_path(self.path).unlink(missing_ok=True)
        self._work.replace(self.path)
        write_json(header_path(self.path), asdict(header), indent=1)


def read_header(path: Path) -> Header:
    """Raises :class:`NotPrepared`, :class:`CorpusUnreadable`."""
    if not path.is_file():
        raise CorpusUnreadable(path, "no such file")
    try:
        raw = json.loads(header_path(path).read_text())
    except FileNotFoundError as error:
        raise NotPrepared(path, f"{header_path(path).name} is not beside it") from error
    except ValueError as error:
        raise NotPrepared(path, f"{header_path(path).name} is not JSON ({error})") from error
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise NotPrepared(path, f"it is of format version {version}, this is {FORMAT_VERSION}")
    return Header(**raw)


def require_target(path: Path, header: Header, target: Path) -> None:
    """Raises :class:`OtherTarget` where the file was prepared for another one."""
    from tide_platform.config import target_digest

    digest = target_digest(target)
    if digest != header.target_digest:
        raise OtherTarget(path, header.target_digest, target, digest)


def read_examples(path: Path) -> Iterator[Example]:
    """All records in order, one at a time in memory."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            raw = json.loads(line)
            yield Example(raw["id"], np.array(raw["input_ids"], np.int64), np.array(raw["loss_mask"], bool))
