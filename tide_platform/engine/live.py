"""What the served draft is worth on live traffic: counts of each finished request, captured or not.

No token and no text is kept, only counts and times. The newest requests wait in a bounded buffer; who watches
the server (``/tide/requests``) asks for those behind the last it has seen, and is told how many it missed.
Runs on the scheduler's thread; knows nothing of SGLang but its requests' counters.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

BUFFER = 4096  # finished requests
MOST = 1024  # of an answer
MARK = "tide_live"  # attribute that a request carries


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has ended. ``draft`` served all of it, unless it ``straddles`` a reload."""

    at: float  # Unix time, seconds
    tenant: str
    draft: str  # digest, when it began
    straddles: bool
    prompt_tokens: int
    tokens: int  # of the response
    rounds: int  # verify rounds
    accepted: int  # draft tokens accepted in them
    token_ms: float | None  # a token behind the first; None where there is none
    concurrency: float | None  # mean number of requests in the decode steps while it ran
    reason: str  # stop | length | abort


class Newest:
    """The newest of what has ended, each under a number, from 1."""

    def __init__(self) -> None:
        self.last = 0
        self._kept: deque[dict[str, Any]] = deque(maxlen=BUFFER)

    def add(self, one: dict[str, Any]) -> None:
        self.last += 1
        self._kept.append(one | {"number": self.last})

    def skip(self, count: int) -> None:
        """So many were forgotten before they came here."""
        self.last += count

    def since(self, number: int, most: int = MOST) -> dict[str, Any]:
        """Those behind ``number``, oldest first, at most ``most``; ``missed`` were forgotten before they were
        asked for. A ``number`` that is not known yet is of the server's life before a restart: all is told.
        """
        after = number if number <= self.last else 0
        kept = [one for one in self._kept if one["number"] > after]
        told = kept[:most]
        missing = (told[-1]["number"] if told else self.last) - after - len(told)
        return {"restarted": number > self.last, "missed": missing, "requests": told, "last": self.last}


@dataclass(slots=True)
class _Begun:
    draft: str
    first_token_at: float | None = None  # monotonic seconds: its prefill's end
    steps: int = 0  # decode steps of the server by then
    requests: int = 0  # and requests in them, summed


class Live:
    """The newest finished requests of one scheduler, and how many requests its rounds had."""

    def __init__(
        self,
        draft: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ):
        self.draft = draft
        self.started_at = clock()  # tells one life of the server from the next
        self._clock, self._monotonic = clock, monotonic
        self._newest = Newest()
        # since the draft was loaded: requests in a decode step -> steps
        self.rounds_by_batch: Counter[int] = Counter()
        self._steps = self._requests = 0  # since the start

    def draft_changed(self, digest: str) -> None:
        """Another draft is served from the next step on."""
        self.draft = digest
        self.rounds_by_batch.clear()

    def prefill(self, reqs: Sequence[Any]) -> None:
        """Before a prefill step of these requests."""
        for req in reqs:
            if getattr(req, MARK, None) is None:
                setattr(req, MARK, _Begun(self.draft))

    def prefilled(self, reqs: Sequence[Any]) -> None:
        """Behind it. Of a chunked prompt the last chunk's end counts; of a retracted request the first."""
        now = self._monotonic()
        for req in reqs:
            begun: _Begun | None = getattr(req, MARK, None)
            # None: it ended within the step
            if begun is not None and (begun.first_token_at is None or not len(req.output_ids)):
                begun.first_token_at = now
                begun.steps, begun.requests = self._steps, self._requests

    def decoded(self, requests: int) -> None:
        """Behind a decode step of so many requests."""
        self.rounds_by_batch[requests] += 1
        self._steps += 1
        self._requests += requests

    def ended(self, req: Any, tenant: str, tokens: int, reason: str) -> None:
        """Once for each request that was prefilled."""
        begun: _Begun | None = getattr(req, MARK, None)
        if begun is None:
            return
        setattr(req, MARK, None)
        token_ms = concurrency = None
        if (steps := self._steps - begun.steps) > 0 and begun.first_token_at is not None:
            concurrency = (self._requests - begun.requests) / steps
        if begun.first_token_at is not None and tokens > 1:
            token_ms = (self._monotonic() - begun.first_token_at) * 1000 / (tokens - 1)
        finished = Finished(
            at=self._clock(),
            tenant=tenant,
            draft=begun.draft,
            straddles=begun.draft != self.draft,
            prompt_tokens=len(req.origin_input_ids),
            tokens=tokens,
            rounds=req.spec_verify_ct,
            accepted=req.spec_num_correct_drafts,
            token_ms=token_ms,
            concurrency=concurrency,
            reason=reason,
        )
        self._newest.add(asdict(finished))

    def since(self, number: int, most: int = MOST) -> dict[str, Any]:
        """As :meth:`Newest.since`, and what stands beside it."""
        return {
            "draft": self.draft,
            "started_at": self.started_at,
            "rounds_by_batch": {str(size): steps for size, steps in sorted(self.rounds_by_batch.items())},
        } | self._newest.since(number, most)
