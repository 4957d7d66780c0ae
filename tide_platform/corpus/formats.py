"""Which format a file is in, and its records as what they mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tide_platform.corpus.errors import BadRecord, FormatMismatch, MixedFormats, UnknownFormat
from tide_platform.corpus.messages import from_openai, from_sharegpt
from tide_platform.corpus.reading import Record

HEAD = 16  # records that a format is recognised by


class Kind(StrEnum):
    SHAREGPT = "sharegpt"
    OPENAI = "openai"
    TOKENS = "tokens"
    TEXT = "text"  # a template was applied already (--preformatted)


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Tokens:
    """Token ids, and which of them are responses; no mask: a prompt alone."""

    input_ids: list[int]
    loss_mask: list[bool] | None


@dataclass(frozen=True)
class Text:
    """A whole rendered conversation."""

    text: str


def kind_of(value: Any) -> Kind | None:
    """By the columns; None where they are those of no format."""
    if not isinstance(value, dict):
        return None
    if "input_ids" in value:
        return Kind.TOKENS
    messages = _messages(value)
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        return Kind.OPENAI if "role" in messages[0] else Kind.SHAREGPT if "from" in messages[0] else None
    return Kind.TEXT if isinstance(value.get("text"), str) else None


def recognise(path: Path, head: Sequence[Record], asked: Kind | None) -> Kind:
    """The format of a file whose first records these are; ``asked``: what the user says that it is.

    Raises :class:`UnknownFormat`, :class:`MixedFormats`, :class:`FormatMismatch`.
    """
    first_of: dict[str, int] = {}
    for record in head:
        kind = None if record.error else kind_of(record.value)
        if kind is not None:
            first_of.setdefault(kind, record.number)
    columns = sorted({key for r in head if not r.error and isinstance(r.value, dict) for key in r.value})
    if not first_of:
        raise UnknownFormat(path, columns)
    if asked is not None and asked not in first_of:
        raise FormatMismatch(path, asked, next(iter(first_of)), columns)
    if asked is None and len(first_of) > 1:
        raise MixedFormats(path, first_of)
    found = asked or Kind(next(iter(first_of)))
    if asked is None and found is Kind.TEXT:
        raise FormatMismatch(path, "conversations", found, columns)
    return found


def parse(record: Record, kind: Kind) -> Conversation | Tokens | Text:
    """Raises :class:`BadRecord`, which says why."""
    if record.error:
        raise BadRecord(record.error)
    value, found = record.value, kind_of(record.value)
    if found is not kind:
        kept = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise BadRecord(f"is {found or 'of no known format'} ({kept}) in a file of {kind}")
    if kind is Kind.TEXT:
        return Text(value["text"])
    if kind is Kind.TOKENS:
        return _tokens(value)
    read = from_sharegpt if kind is Kind.SHAREGPT else from_openai
    tools = value.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise BadRecord("`tools` must be a list of objects")
    return Conversation(read(_messages(value), value.get("system")), tools or None)


def _messages(value: dict[str, Any]) -> Any:
    return value.get("messages", value.get("conversations"))


def _tokens(value: dict[str, Any]) -> Tokens:
    ids, mask = value["input_ids"], value.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise BadRecord("`input_ids` must be a list of token ids")
    if mask is None:
        return Tokens(ids, None)
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise BadRecord("`loss_mask` must be a list of 0 and 1, as long as `input_ids`")
    return Tokens(ids, [bool(m) for m in mask])
