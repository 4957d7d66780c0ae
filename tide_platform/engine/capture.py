"""The life of a captured request, from admission to the finished sample.

Runs on SGLang's scheduler thread; knows nothing of SGLang: the adapter tells it what it sees.
"""

import uuid
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tide_platform.capture.record import SampleMeta
from tide_platform.engine.policy import Policy, Request
from tide_platform.engine.teacher import TeacherRows

# reasons of the writer that lose a sample which was meant to be kept
LOST = ("ring_full", "staging_full", "malformed", "error")
NO_TOKENS = np.zeros(0, np.int32)


class Writer(Protocol):
    """The ring's writer end (``tide_platform.capture.ring.RingWriter``)."""

    dropped: dict[str, int]

    def begin(self, rid: str, meta: SampleMeta) -> bool: ...

    def write(
        self,
        rid: str,
        pos: int,
        aux: np.ndarray,
        teacher_pos: int,
        teacher_ids: np.ndarray,
        teacher_logp: np.ndarray,
        token_logp: np.ndarray,
        tokens_pos: int,
        tokens: np.ndarray,
        last_hidden: np.ndarray,
    ) -> bool: ...

    def update(self, rid: str, **changed: Any) -> object: ...

    def finish(self, rid: str, meta: SampleMeta, tokens_pos: int, tokens: np.ndarray) -> bool: ...

    def discard(self, rid: str, reason: str) -> None: ...


@dataclass
class OpenSample:
    """A request that is being captured."""

    sample_id: str
    request: Request
    draft_version: str  # when it was admitted
    start_pos: int  # rows before it are not kept
    opened_at: float  # Unix time, seconds
    k: int  # the most draft tokens of a round so far; before the first one, the server's setting
    rounds_seen: bool = False
    adaptive: bool = False  # k changed
    first_row: int | None = None
    next_row: int = 0
    next_token: int = 0  # position of the first token that was not given to the ring yet
    holes: bool = False
    teacher_rows: int = 0
    lost: bool = False  # no more work is done for it
    gone: bool = False  # the writer was told to forget it


@dataclass(frozen=True)
class Ending:
    """What the adapter reads of a request when it ends."""

    tokens: int  # of prompt and response through the stop
    tail_pos: int  # position of tail[0]
    tail: np.ndarray  # int32, the tokens that were not given with rows
    reason: str  # stop | length | abort
    time: float
    verify_rounds: int
    accepted_drafts: int
    retracted: bool


@dataclass(frozen=True)
class Origin:
    """What all samples of this server share."""

    target_digest: str
    verify_rule: str
    adapter: str
    dp_rank: int = 0


class Capture:
    """The open samples, the policy and the counts."""

    def __init__(
        self,
        writer: Writer,
        policy: Policy,
        origin: Origin,
        draft_version: str,
        k: int,
        prompt_tail_tokens: int | None = None,
    ):
        self.writer, self.policy, self.origin, self.k = writer, policy, origin, k
        self.prompt_tail_tokens = prompt_tail_tokens
        self.draft_version = draft_version  # of the draft that is served now
        self.open: dict[str, OpenSample] = {}  # by sample id
        self.skipped: dict[str, int] = {}
        self.ignored: dict[str, int] = {}  # what requests said and was not believed (consent.py)
        self.samples = self.rows = self.bytes = 0

    def admit(self, request: Request, now: float) -> OpenSample | None:
        """Decides once for a request, whose sample :meth:`begin` then opens. The ring knows it by a fresh id:
        clients choose request ids freely.
        """
        for cause in filter(None, str(request.options.get("ignored", "")).split(",")):
            self.ignored[cause] = self.ignored.get(cause, 0) + 1
        reason = self.policy.refusal(request)
        if reason:
            self.skip(reason)
            return None
        tail = self.prompt_tail_tokens
        start = 0 if tail is None else max(0, request.prompt_tokens - tail)
        sample = OpenSample(uuid.uuid4().hex, request, self.draft_version, start, now, self.k)
        sample.next_row = sample.next_token = start
        return sample

    def begin(self, sample: OpenSample) -> None:
        """Opens an admitted sample, before anything else of it."""
        self.open[sample.sample_id] = sample
        sample.lost = not self.writer.begin(sample.sample_id, self._meta(sample, None))

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def write(
        self,
        sample: OpenSample,
        pos: int,
        aux: np.ndarray,
        teacher_pos: int,
        rows: TeacherRows,
        tokens_pos: int = 0,
        tokens: np.ndarray = NO_TOKENS,
    ) -> None:
        """Rows of ``sample``: ``aux`` uint16 [R, 3H] from position ``pos``, teachers from ``teacher_pos``,
        and ``tokens`` int32 from ``tokens_pos``, which are known for certain.
        """
        if sample.lost:
            return
        if self.policy.too_long(pos + len(aux)):
            self.drop(sample, "too_long")
            return
        if sample.first_row is None:
            sample.first_row = pos
        if pos > sample.next_row and not sample.holes:
            sample.holes = True
            self.writer.update(sample.sample_id, flags=("truncated_context",))
        sample.next_row = max(sample.next_row, pos + len(aux))
        sample.teacher_rows += len(rows.token_logp)
        kept = self.writer.write(
            sample.sample_id,
            pos,
            aux,
            teacher_pos,
            rows.ids,
            rows.logp,
            rows.token_logp,
            tokens_pos,
            tokens,
            rows.last_hidden,
        )
        sample.lost = not kept
        if kept:
            written = aux.nbytes + rows.nbytes + tokens.nbytes
            self.rows += len(aux)
            self.bytes += written
            self.policy.budget.debit(written)

    def saw_round(self, sample: OpenSample, k: int) -> None:
        """``k`` draft tokens were proposed to the sample in a round; a second k makes it adaptive."""
        if sample.rounds_seen and k == sample.k:
            return
        if sample.rounds_seen and not sample.adaptive:
            sample.adaptive = True
            self.writer.update(sample.sample_id, flags=("adaptive_k",))
        most = max(k, sample.k) if sample.rounds_seen else k
        if most != sample.k:
            sample.k = most
            self.writer.update(sample.sample_id, k=most)
        sample.rounds_seen = True

    def draft_changed(self, version: str) -> None:
        """Another draft is served from now on; requests in flight were served by both."""
        self.draft_version = version
        for sample in list(self.open.values()):  # on a GPU the scheduler's thread admits meanwhile
            if not sample.lost:
                self.writer.update(sample.sample_id, draft_version_end=version)

    def close(self, sample: OpenSample, ending: Ending) -> None:
        """Ends a sample: written where it has something to learn from, given up otherwise."""
        self.open.pop(sample.sample_id, None)
        if sample.gone:
            return
        if not sample.teacher_rows and not sample.lost:
            self.drop(sample, "aborted" if ending.reason == "abort" else "no_response")
            return
        meta = self._meta(sample, ending)
        if self.writer.finish(sample.sample_id, meta, ending.tail_pos, ending.tail):
            self.samples += 1

    def give_up(self, reason: str) -> None:
        """Drops every open sample (capture itself failed)."""
        for sample in list(self.open.values()):
            if not sample.gone:
                self.drop(sample, reason)
        self.open.clear()

    def status(self) -> dict[str, Any]:
        """Counts for ``/tide/status``: ``dropped`` samples were lost, ``skipped`` ones were not wanted."""
        dropped, skipped = self.drops()
        return self.policy.status() | {
            "samples": self.samples,
            "rows": self.rows,
            "bytes": self.bytes,
            "open": len(self.open),
            "dropped": dropped,
            "skipped": skipped,
            "ignored": dict(self.ignored),
        }

    def drops(self) -> tuple[dict[str, int], dict[str, int]]:
        """``(dropped, skipped)`` by reason. May be called from another thread: the copies are whole."""
        counted = dict(self.writer.dropped)
        dropped = {reason: n for reason, n in counted.items() if reason in LOST}
        others = {reason: n for reason, n in counted.items() if reason not in LOST}
        skipped = dict(self.skipped)
        for reason, n in others.items():
            skipped[reason] = skipped.get(reason, 0) + n
        return dropped, skipped

    def drop(self, sample: OpenSample, reason: str) -> None:
        """Gives a sample up that has begun; its :meth:`close` is still to come."""
        self.writer.discard(sample.sample_id, reason)
        sample.lost = sample.gone = True

    def _meta(self, sample: OpenSample, ending: Ending | None) -> SampleMeta:
        """The sample's columns as they are known now; ``ending`` is None at admission."""
        request = sample.request
        flags = {
            "truncated_context": sample.holes or sample.start_pos > 0,
            "penalties": request.penalties,
            "grammar": request.grammar,
            "thinking": request.thinking,
            "tool_calls": request.tool_calls,
            "adaptive_k": sample.adaptive,
            "aborted": ending is not None and ending.reason == "abort",
            "retracted": ending is not None and ending.retracted,
        }
        return SampleMeta(
            sample_id=sample.sample_id,
            request_id=request.rid,
            captured_at=ending.time if ending else sample.opened_at,
            target_digest=self.origin.target_digest,
            draft_version_start=sample.draft_version,
            draft_version_end=self.draft_version,
            verify_rule=self.origin.verify_rule,
            tenant=request.tenant,
            start_pos=sample.start_pos,
            num_tokens=ending.tokens - sample.start_pos if ending else 0,
            prompt_tokens=request.prompt_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            k=sample.k,
            verify_rounds=ending.verify_rounds if ending else 0,
            accepted_drafts=ending.accepted_drafts if ending else 0,
            finish_reason=ending.reason if ending else "",
            dp_rank=self.origin.dp_rank,
            adapter=self.origin.adapter,
            flags=tuple(name for name, present in flags.items() if present),
        )
