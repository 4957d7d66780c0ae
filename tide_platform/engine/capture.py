"""Which requests are captured, and their life from the first row to the finished sample.

Runs on SGLang's scheduler thread; knows nothing of SGLang: the adapter tells it what it sees.
"""

import hashlib
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tide_platform.capture.record import SampleMeta
from tide_platform.engine.teacher import TeacherRows

HASH_RANGE = 1 << 64
# reasons of the writer that lose a sample which was meant to be kept
LOST = ("ring_full", "malformed", "error")


class Writer(Protocol):
    """The ring's writer end (``tide_platform.capture.ring.RingWriter``)."""

    dropped: dict[str, int]

    def write(
        self,
        rid: str,
        pos: int,
        aux: np.ndarray,
        teacher_pos: int,
        teacher_ids: np.ndarray,
        teacher_logp: np.ndarray,
        token_logp: np.ndarray,
    ) -> bool: ...

    def finish(self, rid: str, meta: SampleMeta, input_ids: np.ndarray) -> bool: ...

    def discard(self, rid: str, reason: str) -> None: ...


@dataclass(frozen=True)
class Request:
    """What the adapter reads of a request when it first sees it."""

    rid: str
    prompt_tokens: int
    temperature: float  # 0: greedy
    top_p: float
    top_k: int  # -1: all
    penalties: bool = False  # anything that changes logits but is no grammar
    grammar: bool = False
    unsupported: str | None = None  # the support table's name of what is skipped
    options: dict[str, Any] = field(default_factory=dict)  # sampling_params.custom_params["tide"]

    @property
    def root(self) -> str:
        """What is hashed for sampling: the conversation that the client names, else the request."""
        return str(self.options.get("conversation") or self.rid)

    @property
    def tenant(self) -> str:
        return str(self.options.get("tenant") or "default")


@dataclass
class Policy:
    """Which requests are kept; changed while the server runs."""

    enabled: bool
    default: str  # allow | deny, for requests that do not say
    sampling_rate: float
    deny_tenants: frozenset[str] = frozenset()

    def refusal(self, request: Request) -> str | None:
        """Why the request is not captured, ``None`` where it is.

        A request may forbid its own capture (``train: deny``), and allow it where the default is ``deny``; a
        denied tenant stays denied.
        """
        if not self.enabled:
            return "disabled"
        if request.unsupported:
            return request.unsupported
        if request.tenant in self.deny_tenants:
            return "tenant"
        if request.options.get("train", self.default) != "allow":
            return "opt_out"
        if fraction(request.root) >= self.sampling_rate:
            return "sampled_out"
        return None


def fraction(root: str) -> float:
    """A number in [0, 1) that depends on the root alone: all turns of a conversation fare alike."""
    digest = hashlib.blake2b(root.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / HASH_RANGE


@dataclass
class OpenSample:
    """A request that is being captured."""

    sample_id: str
    request: Request
    draft_version: str  # when its first row was seen
    k: int
    first_row: int | None = None
    next_row: int = 0
    holes: bool = False
    teacher_rows: int = 0
    lost: bool = False  # the ring dropped it; no more work is done for it


@dataclass(frozen=True)
class Ending:
    """What the adapter reads of a request when it ends."""

    input_ids: np.ndarray  # int32 [T], prompt and response through the stop
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

    def __init__(self, writer: Writer, policy: Policy, origin: Origin, draft_version: str, k: int):
        self.writer, self.policy, self.origin, self.k = writer, policy, origin, k
        self.draft_version = draft_version  # of the draft that is served now
        self.open: dict[str, OpenSample] = {}  # by sample id
        self.skipped: dict[str, int] = {}
        self.samples = self.rows = 0

    def admit(self, request: Request) -> OpenSample | None:
        """Decides once for a request. The ring knows it by a fresh id: clients choose request ids freely."""
        reason = self.policy.refusal(request)
        if reason:
            self.skip(reason)
            return None
        sample = OpenSample(uuid.uuid4().hex, request, self.draft_version, self.k)
        self.open[sample.sample_id] = sample
        return sample

    def skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def write(
        self, sample: OpenSample, pos: int, aux: np.ndarray, teacher_pos: int, rows: TeacherRows
    ) -> None:
        """Rows of ``sample``: ``aux`` uint16 [R, 3H] from position ``pos``, teachers from ``teacher_pos``."""
        if sample.lost:
            return
        if sample.first_row is None:
            sample.first_row = pos
        sample.holes = sample.holes or pos > sample.next_row
        sample.next_row = max(sample.next_row, pos + len(aux))
        sample.teacher_rows += len(rows.token_logp)
        kept = self.writer.write(
            sample.sample_id, pos, aux, teacher_pos, rows.ids, rows.logp, rows.token_logp
        )
        sample.lost = not kept
        self.rows += len(aux) if kept else 0

    def close(self, sample: OpenSample, ending: Ending) -> None:
        """Ends a sample: written where it has something to learn from, given up otherwise."""
        self.open.pop(sample.sample_id, None)
        if not sample.teacher_rows and not sample.lost:
            reason = "aborted" if ending.reason == "abort" else "no_response"
            self.writer.discard(sample.sample_id, reason)
            return
        if self.writer.finish(sample.sample_id, self._meta(sample, ending), ending.input_ids):
            self.samples += 1

    def give_up(self, reason: str) -> None:
        """Drops every open sample (capture itself failed)."""
        for sample_id in list(self.open):
            self.writer.discard(sample_id, reason)
            self.open[sample_id].lost = True
        self.open.clear()

    def status(self) -> dict[str, Any]:
        """Counts for ``/tide/status``: ``dropped`` samples were lost, ``skipped`` ones were not wanted."""
        dropped = {reason: n for reason, n in self.writer.dropped.items() if reason in LOST}
        others = {reason: n for reason, n in self.writer.dropped.items() if reason not in LOST}
        return {
            "enabled": self.policy.enabled,
            "default": self.policy.default,
            "sampling_rate": self.policy.sampling_rate,
            "deny_tenants": sorted(self.policy.deny_tenants),
            "samples": self.samples,
            "rows": self.rows,
            "open": len(self.open),
            "dropped": dropped,
            "skipped": self.skipped | others,
        }

    def _meta(self, sample: OpenSample, ending: Ending) -> SampleMeta:
        request = sample.request
        flags = {
            "truncated_context": sample.holes,
            "penalties": request.penalties,
            "grammar": request.grammar,
            "aborted": ending.reason == "abort",
            "retracted": ending.retracted,
        }
        return SampleMeta(
            sample_id=sample.sample_id,
            request_id=request.rid,
            captured_at=ending.time,
            target_digest=self.origin.target_digest,
            draft_version_start=sample.draft_version,
            draft_version_end=self.draft_version,
            verify_rule=self.origin.verify_rule,
            tenant=request.tenant,
            start_pos=0,
            num_tokens=len(ending.input_ids),
            prompt_tokens=request.prompt_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            k=sample.k,
            verify_rounds=ending.verify_rounds,
            accepted_drafts=ending.accepted_drafts,
            finish_reason=ending.reason,
            dp_rank=self.origin.dp_rank,
            adapter=self.origin.adapter,
            flags=tuple(name for name, present in flags.items() if present),
        )
