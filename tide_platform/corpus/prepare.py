"""``tide data prepare``: a file of conversations to token ids with a response mask, for one target."""

import hashlib
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tide_platform.config import target_digest
from tide_platform.corpus.errors import AllTruncated, BadRecord, CorpusUnreadable, NothingMasked
from tide_platform.corpus.formats import HEAD, Conversation, Kind, Text, Tokens, parse, recognise
from tide_platform.corpus.masking import Masked, marked_spans, mask_text
from tide_platform.corpus.prepared import Header, PreparedWriter
from tide_platform.corpus.reading import Record, read_records
from tide_platform.corpus.rejects import Rejects
from tide_platform.corpus.template import ChatTemplate
from tide_platform.draft.config import read_config, text_config

ID_CHARS = 24


@dataclass(frozen=True)
class PreparePlan:
    """What is asked for."""

    format: Kind | None  # None: recognised
    turns: Literal["all", "last"]  # which answers are masked in
    max_length: int  # tokens of a record
    max_rejected: float  # share of the records


@dataclass
class Counts:
    """Of records, where nothing else is said."""

    records: int = 0
    prepared: int = 0
    rejected: int = 0
    truncated: int = 0  # cut at max_length, prepared or not
    truncated_away: int = 0  # cut before their first answer, and left out
    without_response: int = 0  # left out: no token of theirs is a response
    last_turn_only: int = 0  # the template is not incremental over their turns
    answers: int = 0  # of those that are prepared
    tokens: int = 0
    response_tokens: int = 0
    boundary_merges: int = 0  # tokens across the edge of an answer, counted as prompt
    last_turn_reason: str = ""  # of the first such record

    @property
    def coverage(self) -> float:
        """Share of the tokens that are responses."""
        return self.response_tokens / self.tokens if self.tokens else 0.0


def prepare(
    source: Path,
    out: Path,
    target: Path,
    plan: PreparePlan,
    say: Callable[[str], None] = lambda line: None,
) -> Counts:
    """Writes ``out`` and its header; records that cannot be used go to ``out`` + ``.rejected.jsonl``.

    Raises :class:`CorpusError` and its kinds, :class:`TemplateNotIncremental`, :class:`NoOffsets`,
    :class:`NoMarkers`; ``out`` is then what it was before.
    """
    records, kind = open_records(source, plan.format)
    vocab_size = int(text_config(read_config(target))["vocab_size"])
    masker = Masker(ChatTemplate(target), vocab_size, plan, kind)
    say(f"{source}: {kind}")
    counts = masker.counts
    aside = out.with_name(out.name + ".rejected.jsonl")
    with PreparedWriter(out) as writer, Rejects(source, aside, plan.max_rejected) as rejects:
        for record in records:
            counts.records += 1
            try:
                masked = masker.masked(parse(record, kind))
            except BadRecord as error:
                counts.rejected += 1
                rejects.add(record, error.reason)
                continue
            if masked is not None:
                writer.write(content_id(record.value), masked.input_ids, masked.mask)
        rejects.check(counts.records)
        _refuse_nothing(source, counts, plan, kind)
        writer.finish(
            Header(
                source=str(source),
                source_format=kind,
                target_digest=target_digest(target),
                tokenizer_digest=masker.template.tokenizer_digest,
                template_digest=masker.template.digest,
                vocab_size=vocab_size,
                turns=plan.turns,
                max_length=plan.max_length,
                created_at=time.time(),
                counts=asdict(counts) | {"coverage": round(counts.coverage, 6)},
            )
        )
    return counts


def open_records(source: Path, asked: Kind | None) -> tuple["itertools.chain[Record]", Kind]:
    """All records, from the first on, and their format. Raises :class:`CorpusError`."""
    records = read_records(source)
    head = list(itertools.islice(records, HEAD))
    if not head:
        raise CorpusUnreadable(source, "empty")
    return itertools.chain(head, records), recognise(source, head, asked)


def content_id(value: Any) -> str:
    """A record's name, by its content alone: the same in each run, whatever stands beside it."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:ID_CHARS]


class Masker:
    """Records of one format to tokens and mask; keeps count."""

    def __init__(self, template: ChatTemplate, vocab_size: int, plan: PreparePlan, kind: Kind):
        """Raises :class:`NoMarkers` where preformatted texts cannot be masked."""
        self.template, self.vocab_size, self.plan = template, vocab_size, plan
        self.counts = Counts()
        self._markers = template.markers() if kind is Kind.TEXT else ("", "")

    def masked(self, record: Conversation | Tokens | Text) -> Masked | None:
        """None: it holds no response within ``max_length``, and is counted. Raises :class:`BadRecord`."""
        counts, limit = self.counts, self.plan.max_length
        whole = self._tokens(record) if isinstance(record, Tokens) else self._text(record)
        truncated = len(whole.input_ids) > limit
        counts.truncated += truncated
        if not whole.mask.any():
            counts.without_response += 1
            return None
        if not whole.mask[:limit].any():
            counts.truncated_away += 1
            return None
        kept = Masked(whole.input_ids[:limit], whole.mask[:limit], whole.merged)
        counts.prepared += 1
        counts.tokens += len(kept.input_ids)
        counts.response_tokens += int(kept.mask.sum())
        counts.answers += int((np.diff(kept.mask.astype(np.int8), prepend=0) == 1).sum())
        counts.boundary_merges += kept.merged
        return kept

    def _text(self, record: Conversation | Text) -> Masked:
        template, last_only = self.template, self.plan.turns == "last"
        if isinstance(record, Text):
            text, spans = record.text, marked_spans(record.text, *self._markers)
            spans = spans[-1:] if last_only else spans
        else:
            rendered = template.rendered(record, last_only)
            text, spans = rendered.text, rendered.spans
            if rendered.fell_back:
                self.counts.last_turn_only += 1
                self.counts.last_turn_reason = self.counts.last_turn_reason or rendered.fell_back
        return mask_text(template.exact, text, spans, template.end_ids)

    def _tokens(self, record: Tokens) -> Masked:
        if record.loss_mask is None:
            raise BadRecord("no `loss_mask`: a prompt alone; `tide data regenerate` has the target answer it")
        ids, mask = np.array(record.input_ids, np.int64), np.array(record.loss_mask, bool)
        if ids.max() >= self.vocab_size:
            raise BadRecord(f"token {ids.max()} is not in the target's vocabulary of {self.vocab_size}")
        if self.plan.turns == "last" and mask.any():
            end = int(np.flatnonzero(mask)[-1])
            before = np.flatnonzero(~mask[:end])
            mask[: int(before[-1]) + 1 if len(before) else 0] = False
        return Masked(ids, mask)


def _refuse_nothing(source: Path, counts: Counts, plan: PreparePlan, kind: Kind) -> None:
    if counts.prepared:
        return
    if counts.truncated_away:
        raise AllTruncated(source, counts.truncated_away, plan.max_length)
    if kind is Kind.TEXT:
        why = (
            "the markers of the target's template are not in the texts: another template was applied to them"
        )
        mend = "give the conversations themselves, so that the served target's template is applied"
    elif kind is Kind.TOKENS:
        why, mend = "every `loss_mask` is 0 throughout", "set it to 1 where the answers are"
    else:
        why = "the target's chat template renders no answer, or its generation block is empty"
        mend = "check the chat template of the target folder against the one that is served"
    raise NothingMasked(source, counts.records, why, mend)
