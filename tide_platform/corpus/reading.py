"""Records of a JSONL file or a JSON array, one after another: files may be larger than memory."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tide_platform.corpus.errors import CorpusUnreadable

_CHUNK = 1 << 20
_LARGEST = 64 << 20  # characters of one record
_SHOWN = 2000  # characters kept of a record that cannot be read


@dataclass(frozen=True)
class Record:
    """One record as it stands in the file, or what is wrong with it."""

    number: int  # of its line (JSONL) or element (JSON array), from 1
    value: Any  # what was read; the start of the text where ``error`` is set
    error: str | None = None


def read_records(path: Path) -> Iterator[Record]:
    """All records in order. A line that is not JSON is a record with its ``error`` set; a broken array ends
    the reading.

    Raises :class:`CorpusUnreadable`.
    """
    if not path.is_file():
        raise CorpusUnreadable(path, "no such file; give a JSONL file, or a JSON file that holds one array")
    with path.open("rb") as file:
        first = file.read(1)
        while first.isspace() or first == b"\xef":  # a byte order mark begins so
            first = file.read(3 if first == b"\xef" else 1)[-1:]
    if first == b"[":
        with path.open(encoding="utf-8-sig") as file:
            yield from _array(path, file)
    elif first:
        yield from _lines(path)
    else:
        raise CorpusUnreadable(path, "empty")


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield Record(number, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield Record(number, line[:_SHOWN].decode(errors="replace"), f"not JSON: {error}")


def _array(path: Path, file: IO[str]) -> Iterator[Record]:
    """The elements of one array. Each is decoded from a buffer that grows until it holds the element."""
    decoder = json.JSONDecoder()
    buffer, at, number, wanted = "", 0, 0, _CHUNK
    opened = expects_more = False  # behind the bracket; behind a comma
    while True:
        at = _skip_space(buffer, at)
        if at == len(buffer):
            buffer, at = _read(path, file, 1 + _CHUNK), 0
            if not buffer:
                raise CorpusUnreadable(path, f"its JSON array ends after element {number} without a `]`")
            continue
        character = buffer[at]
        if not opened:
            at, opened = at + 1, True  # the caller saw the bracket
        elif character == "]" and not expects_more:
            if buffer[at + 1 :].strip() or file.read(_CHUNK).strip():
                raise CorpusUnreadable(path, "something follows its JSON array; give JSONL, or one array")
            return
        elif character == "," and number and not expects_more:
            at, expects_more = at + 1, True
        elif number and not expects_more:
            raise CorpusUnreadable(path, f"after element {number} a comma or `]` must follow")
        else:
            try:
                value, end = decoder.raw_decode(buffer, at)
                if end == len(buffer):  # a number may go on
                    raise json.JSONDecodeError("unfinished", buffer, end)
            except (json.JSONDecodeError, RecursionError) as error:
                more = _read(path, file, wanted)
                if not more or len(buffer) - at > _LARGEST:
                    text = f"element {number + 1} of its JSON array is broken ({error}); as JSONL, one "
                    raise CorpusUnreadable(path, text + "broken record does no harm") from error
                buffer, at, wanted = buffer[at:] + more, 0, min(2 * wanted, _LARGEST)
                continue
            number, at, wanted, expects_more = number + 1, end, _CHUNK, False
            yield Record(number, value)
            if at > _CHUNK:
                buffer, at = buffer[at:], 0


def _skip_space(buffer: str, at: int) -> int:
    while at < len(buffer) and buffer[at] in " \t\r\n":
        at += 1
    return at


def _read(path: Path, file: IO[str], characters: int) -> str:
    try:
        return file.read(characters)
    except UnicodeDecodeError as error:
        raise CorpusUnreadable(path, f"not UTF-8: {error.reason}; save it as UTF-8") from error
