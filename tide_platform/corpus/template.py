"""Conversations as the served target's chat template renders them, and where its answers are in the text.

An answer's span in characters begins where the generation prompt ends, as the server would have sent it, and
ends with the turn, end-of-turn token included. It is found by comparing *texts*, never tokens: the text of a
prompt must be the beginning of the text of the whole conversation.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import TideError
from tide_platform.corpus.errors import BadRecord, NoMarkers, NoOffsets, TemplateNotIncremental
from tide_platform.corpus.formats import Conversation
from tide_platform.corpus.masking import exact_offsets
from tide_platform.corpus.messages import answers
from tide_platform.serving.chat import load_tokenizer

DIGEST_CHARS = 16
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers looks for it
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Ultramarine"},
]
_AROUND = 30  # characters shown where two renders part


@dataclass(frozen=True)
class Rendered:
    """A conversation's text and its answers: spans [start, end) in characters, ascending."""

    text: str
    spans: list[tuple[int, int]]
    fell_back: str | None = None  # why only the last answer is in ``spans``, where all were wanted


class _Parted(Exception):
    """Two renders that should continue one another do not."""


class ChatTemplate:
    """The template and the tokenizer of a target's folder.

    Raises :class:`NoOffsets`; :class:`TemplateNotIncremental` where not even one question and answer render
    as a continuation of the question, and the template does not mark its answers.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tokenizer = load_tokenizer(folder.resolve())
        if not self.tokenizer.is_fast:
            raise NoOffsets(folder)
        self.exact = exact_offsets(self.tokenizer)
        try:
            self.source: str = self.tokenizer.get_chat_template()
        except ValueError as error:
            raise TideError(f"{folder}: no chat template; add its chat_template.jinja") from error
        self.digest = _sha256(self.source)
        self.tokenizer_digest = _sha256(self.tokenizer.backend_tokenizer.to_str())
        self.marks_answers = bool(_GENERATION.search(self.source))
        self.end_ids = end_token_ids(folder)
        if not self.marks_answers:
            try:
                self._span(self.render(_PROBE), _PROBE, 1, None)
            except (_Parted, BadRecord) as error:
                raise TemplateNotIncremental(folder, self.digest, str(error)) from error

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, prompt: bool = False
    ) -> str:
        """The text; ``prompt``: with the generation prompt behind it. Raises :class:`BadRecord`."""
        with _refusals():
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )

    def prompt_ids(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids up to where the answer begins, as a server that is sent the messages makes them.

        Raises :class:`BadRecord`.
        """
        text = self.render(messages, tools, prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def rendered(self, conversation: Conversation, last_only: bool = False) -> Rendered:
        """The text and its answers. Where the renders of a conversation's earlier turns do not continue one
        another (a template that takes old thinking out), only its last answer. Raises :class:`BadRecord`.
        """
        messages, tools = conversation.messages, conversation.tools
        if self.marks_answers:
            text, spans = self._marked(messages, tools)
            return Rendered(text, spans[-1:] if last_only else spans)
        text, places = self.render(messages, tools), answers(messages)
        fell_back = None
        if not last_only:
            try:
                return Rendered(text, [self._span(text, messages, place, tools) for place in places])
            except _Parted as parted:
                if len(places) == 1:
                    raise BadRecord(f"template: {parted}") from parted
                fell_back = str(parted)
        try:
            return Rendered(text, [self._span(text, messages, places[-1], tools)], fell_back)
        except _Parted as parted:
            raise BadRecord(f"template: {parted}") from parted

    def markers(self) -> tuple[str, str]:
        """What the template puts before and behind an answer, for texts that it was applied to.

        Raises :class:`NoMarkers`.
        """
        question, whole = self.render(_PROBE[:1]), self.render(_PROBE)
        before = self.render(_PROBE[:1], prompt=True).removeprefix(question)
        behind = whole.rpartition(_PROBE[1]["content"])[2]
        if not before.strip() or not behind.strip():
            raise NoMarkers(self.folder, self.digest)
        return before, behind.rstrip()

    def _span(
        self,
        text: str,
        messages: list[dict[str, Any]],
        place: int,
        tools: list[dict[str, Any]] | None,
    ) -> tuple[int, int]:
        """Of the answer ``messages[place]``; the text is that of all of them. Raises :class:`_Parted`."""
        prompt = self.render(messages[:place], tools, prompt=True)
        turn = text if place == len(messages) - 1 else self.render(messages[: place + 1], tools)
        for part in (prompt, turn):
            if not text.startswith(part):
                raise _Parted(f"at message {place + 1}, {_parting(part, text)}")
        if len(turn) < len(prompt):
            raise _Parted(f"the turn of message {place + 1} is shorter than its prompt")
        return len(prompt), len(turn)

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """By the template's own ``{% generation %}``: what apply_chat_template's
        ``return_assistant_tokens_mask`` is made from, before it becomes tokens.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            texts, spans = render_jinja_template(  # type: ignore[misc]  # annotated as a str, returns a pair
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        return texts[0], [(int(start), int(end)) for start, end in spans[0]]


@contextmanager
def _refusals() -> Iterator[None]:
    """What a template raises of messages that it does not take, as :class:`BadRecord`."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise BadRecord(f"template: {error}") from error


def end_token_ids(folder: Path) -> frozenset[int]:
    """Tokens that end an answer of this target: its server generates nothing behind them."""
    tokenizer = load_tokenizer(folder.resolve())
    path = folder / "generation_config.json"
    named = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    named = named if isinstance(named, list) else [named]
    return frozenset(int(i) for i in (*named, tokenizer.eos_token_id) if i is not None)


def _parting(part: str, text: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text))
    )
    here = slice(max(0, at - _AROUND), at + _AROUND)
    return f"character {at}: the beginning renders …{part[here]!r}, the whole …{text[here]!r}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]
