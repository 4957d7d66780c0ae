"""``tide data regenerate``: the answers of a file replaced by the target's own, through the server.

A draft learns to guess what *this* target says, so answers of another model teach it little. With capture on,
the server keeps the states of its answers as it gives them: the samples reach the dataset as traffic does.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from tide_platform.config import TideError, target_digest
from tide_platform.corpus.answers import Answers
from tide_platform.corpus.errors import BadRecord, RegenerationFailed
from tide_platform.corpus.formats import Conversation, Kind, Text, Tokens, parse
from tide_platform.corpus.messages import answers
from tide_platform.corpus.prepare import content_id, open_records
from tide_platform.corpus.reading import Record
from tide_platform.corpus.rejects import Rejects
from tide_platform.corpus.template import ChatTemplate
from tide_platform.serving.client import (
    AsyncSglangClient,
    GenerateRequest,
    Generation,
    ServerRefused,
    ServerUnreachable,
)

_BUSY = (429, 503)  # the request did not run
_OF_THE_REQUEST = (400, 413, 422)  # too long, mostly: says nothing of the server
_ATTEMPTS = 4


@dataclass(frozen=True)
class RegeneratePlan:
    """What is asked of the server."""

    format: Kind | None  # None: recognised
    turns: Literal["all", "last"]  # which answers are replaced
    tenant: str
    capture: bool
    concurrency: int
    temperature: float
    max_new_tokens: int
    max_rejected: float  # share of the records


@dataclass
class RegenerateCounts:
    """Of records: ``records == regenerated + errors + skipped``."""

    records: int = 0
    regenerated: int = 0
    errors: int = 0
    known: int = 0  # answered by an earlier run
    duplicates: int = 0  # the same as one before it
    without_answer: int = 0  # all their answers call tools
    rejected: int = 0
    requests: int = 0
    kept_tool_calls: int = 0  # answers left as they are, since the conversation builds on their calls
    cut: int = 0  # answers that reached max_new_tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0
    verify_rounds: int = 0
    accepted_drafts: int = 0

    @property
    def skipped(self) -> int:
        return self.known + self.duplicates + self.without_answer + self.rejected

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted_drafts / self.verify_rounds if self.verify_rounds else None


def regenerate(
    source: Path,
    out: Path,
    base_url: str,
    target: Path,
    plan: RegeneratePlan,
    on_progress: Callable[[RegenerateCounts], None] = lambda counts: None,
) -> RegenerateCounts:
    """Appends to ``out`` what an earlier run of the same settings has not answered yet.

    Conversations come out as OpenAI messages, pre-tokenised prompts as ``input_ids`` and ``loss_mask``; both
    are formats that `tide data prepare` reads. Raises :class:`CorpusError` and its kinds,
    :class:`RegenerationFailed` when the server does nothing but fail.
    """
    records, kind = open_records(source, plan.format)
    assert kind is not Kind.TEXT  # it has no messages to answer; it is never recognised unasked
    template = ChatTemplate(target)
    settings = {
        "target_digest": target_digest(target),
        "template_digest": template.digest,
        "format": str(kind),
        "turns": plan.turns,
        "temperature": plan.temperature,
        "max_new_tokens": plan.max_new_tokens,
    }
    aside = out.with_name(out.name + ".rejected.jsonl")
    with (
        Answers(out, settings) as written,
        Rejects(source, aside, plan.max_rejected) as rejects,
    ):
        run = _Run(plan, kind, template, written, rejects, on_progress)
        asyncio.run(run.send(base_url, records))
        rejects.check(run.counts.records)
    return run.counts


@dataclass
class _Run:
    plan: RegeneratePlan
    kind: Kind
    template: ChatTemplate
    written: Answers
    rejects: Rejects
    on_progress: Callable[[RegenerateCounts], None]
    counts: RegenerateCounts = field(default_factory=RegenerateCounts)
    failures: int = 0  # in a row, of the server

    async def send(self, base_url: str, records: Iterable[Record]) -> None:
        """A bounded number of conversations at a time, read as they are needed."""
        pending = self._pending(records)
        async with AsyncSglangClient(base_url, self.plan.concurrency) as client:

            async def worker() -> None:
                for name, record, parsed in pending:
                    await self._one(client, name, record, parsed)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self.plan.concurrency):
                        group.create_task(worker())
            except* TideError as failed:
                raise failed.exceptions[0] from None

    def _pending(self, records: Iterable[Record]) -> Iterator[tuple[str, Record, Conversation | Tokens]]:
        """Records that are still to be answered."""
        counts, earlier, seen = self.counts, frozenset(self.written.done), set[str]()
        for record in records:
            counts.records += 1
            try:
                parsed = parse(record, self.kind)
            except BadRecord as error:
                counts.rejected += 1
                self.rejects.add(record, error.reason)
                continue
            assert not isinstance(parsed, Text)
            name = content_id(record.value)
            if name in seen:
                counts.duplicates += 1
            elif name in earlier:
                counts.known += 1
            elif isinstance(parsed, Conversation) and not self._places(parsed):
                counts.without_answer += 1
            else:
                seen.add(name)
                yield name, record, parsed
                continue
            seen.add(name)

    async def _one(
        self, client: AsyncSglangClient, name: str, record: Record, parsed: Conversation | Tokens
    ) -> None:
        try:
            if isinstance(parsed, Tokens):
                content = await self._tokens(client, name, parsed)
            else:
                content = await self._conversation(client, name, parsed)
        except (ServerRefused, ServerUnreachable, BadRecord) as error:
            self.counts.errors += 1
            self.written.fail(name, record.number, str(error))
            self.failures += _by_the_server(error)
            if self.failures >= 2 * self.plan.concurrency + 2:
                raise RegenerationFailed(self.failures, str(error)) from error
        else:
            self.failures = 0
            self.written.add(name, content)
            self.counts.regenerated += 1
        self.on_progress(self.counts)

    async def _conversation(
        self, client: AsyncSglangClient, name: str, conversation: Conversation
    ) -> dict[str, Any]:
        """Its answers in order, each given the new ones before it."""
        messages, tools = list(conversation.messages), conversation.tools
        for place in self._places(conversation):
            prompt = self.template.prompt_ids(messages[:place], tools)
            generation = await self._ask(client, name, f"{name}-{place}", prompt)
            if not generation.text.strip():
                raise BadRecord(f"the target's answer {place + 1} is empty")
            messages[place] = {"role": "assistant", "content": generation.text}
        self.counts.kept_tool_calls += sum(bool(messages[i].get("tool_calls")) for i in answers(messages))
        return {"messages": messages} | ({"tools": tools} if tools else {})

    async def _tokens(self, client: AsyncSglangClient, name: str, tokens: Tokens) -> dict[str, Any]:
        mask = tokens.loss_mask or []
        start = mask.index(True) if True in mask else len(tokens.input_ids)
        prompt = tokens.input_ids[:start]
        if not prompt:
            raise BadRecord("its first token is a response already: there is no prompt")
        generation = await self._ask(client, name, name, prompt)
        if not generation.output_ids:
            raise BadRecord("the target's answer is empty")
        answer = generation.output_ids[: generation.completion_tokens]
        return {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}

    async def _ask(
        self, client: AsyncSglangClient, conversation: str, rid: str, prompt: list[int]
    ) -> Generation:
        """Raises :class:`BadRecord` for an aborted answer, and what the client raises."""
        plan, counts = self.plan, self.counts
        consent = "allow" if plan.capture else "deny"
        # all answers of a conversation are captured, or none
        tide = {"train": consent, "tenant": plan.tenant, "conversation": conversation}
        request = GenerateRequest(
            prompt,
            plan.max_new_tokens,
            plan.temperature,
            rid=f"data-{rid}",
            sampling={"custom_params": {"tide": tide}},
        )
        generation = await _patiently(client, request)
        if generation.finish_reason == "abort":
            raise BadRecord("the server aborted the answer")
        counts.requests += 1
        counts.cut += generation.finish_reason == "length"
        counts.prompt_tokens += generation.prompt_tokens
        counts.completion_tokens += generation.completion_tokens
        counts.verify_rounds += generation.verify_rounds
        counts.accepted_drafts += generation.accepted_drafts
        return generation

    def _places(self, conversation: Conversation) -> list[int]:
        """The answers that are replaced."""
        messages = conversation.messages
        places = answers(messages)
        places = places[-1:] if self.plan.turns == "last" else places
        return [place for place in places if not messages[place].get("tool_calls")]


def _by_the_server(error: Exception) -> bool:
    """Whether it says that other conversations will fail as well."""
    of_the_request = isinstance(error, ServerRefused) and error.status in _OF_THE_REQUEST
    return not of_the_request and not isinstance(error, BadRecord)


async def _patiently(client: AsyncSglangClient, request: GenerateRequest) -> Generation:
    """Tries again where the server was too busy to begin; the client itself waits out failed connections."""

    def busy(error: BaseException) -> bool:
        return isinstance(error, ServerRefused) and error.status in _BUSY

    async for attempt in AsyncRetrying(
        retry=retry_if_exception(busy),
        stop=stop_after_attempt(_ATTEMPTS),
        wait=wait_exponential_jitter(multiplier=0.5, max=10),
        reraise=True,
    ):
        with attempt:
            return await client.generate(request)
    raise AssertionError("tenacity gives up by raising")
