"""The hooks around a forward step: which requests are captured, and their rows on the way to the stager."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from tide_platform.engine.capture import Capture, Ending, OpenSample
from tide_platform.engine.last_hidden import LastHidden
from tide_platform.engine.live import MARK as LIVE
from tide_platform.engine.live import Live
from tide_platform.engine.policy import Request
from tide_platform.engine.steps import (
    DirectStager,
    Planned,
    PrefillStep,
    Stager,
    VerifyStep,
    plan_request,
    tokens_between,
)

logger = logging.getLogger("tide")

# attribute that a request carries: its open sample, or None where it is not captured
MARK = "tide_sample"


class Sampled(Protocol):
    """What a version's batches and requests mean (part of ``hooks.Sglang``)."""

    def is_health_check(self, req: Any) -> bool: ...

    def read_request(self, req: Any) -> Request: ...

    def changes_logits(self, sampling: Any) -> bool:
        """Whether penalties or bias are added to a verify step's logits in place."""
        ...

    def is_abort(self, output: Any) -> bool:
        """Whether what is sent to a client ends a request that never ran to its end."""
        ...


@dataclass
class Cost:
    """Time on the scheduler's thread since the start, in seconds; ``cpu`` is that thread's own."""

    rounds: int = 0
    round_s: float = 0.0  # all forward steps, capture's part included
    round_cpu_s: float = 0.0
    capture_s: float = 0.0
    capture_cpu_s: float = 0.0
    # capture's seconds a step, ends of requests since the step before included
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    _told: float = 0.0  # of capture_s, in `recent`

    def add_round(self, wall: float, cpu: float) -> None:
        self.rounds += 1
        self.round_s += wall
        self.round_cpu_s += cpu
        if self.capture_s > self._told:
            self.recent.append(self.capture_s - self._told)
            self._told = self.capture_s

    def status(self) -> dict[str, float]:
        names = ("rounds", "round_s", "round_cpu_s", "capture_s", "capture_cpu_s")
        return {name: getattr(self, name) for name in names}


class RowHooks:
    """Capture's hooks in a scheduler process; does nothing before :meth:`start`."""

    def __init__(
        self, sglang: Sampled, teacher_k: int, failed: Callable[[Exception], None], last_width: int = 0
    ):
        """``last_width``: H where the last hidden states are captured as well."""
        self.sglang, self.teacher_k, self._failed = sglang, teacher_k, failed
        self.last_width, self.last = last_width, LastHidden()
        self.capture: Capture | None = None
        self.stager: Stager | None = None
        self.live: Live | None = None  # where a draft is served, captured or not
        self.cost = Cost()
        self._prefill: _Prefill | None = None  # while its forward step runs

    def start(self, capture: Capture, stager: Stager | None = None) -> None:
        self.capture = capture
        self.stager = stager or DirectStager(capture, self.teacher_k, self.last_width)

    def give_up(self, reason: str) -> None:
        """Drops every open sample: capture had a fault."""
        if self.capture is not None and self.stager is not None:
            self.capture.policy.enabled = False
            self.stager.run(self.capture.give_up, reason)

    def watch(self, live: Live) -> None:
        """Counts finished requests from now on."""
        self.live = live

    def draft_changed(self, version: str) -> None:
        """Another draft is served from the next step on."""
        if self.live is not None:
            self.live.draft_changed(version)
        if self.capture is not None and self.stager is not None:
            self._guarded(self.stager.run, self.capture.draft_changed, version)

    # ---- a forward step ----

    def on_forward(self, original: Callable, worker: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        reqs = list(batch.reqs or ())  # a step may take finished ones out
        extends = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        self._observe(lambda live: live.prefill(reqs) if extends else None)
        try:
            if extends and self.capture is not None:
                return self._extend(original, worker, batch, *rest, **named)
            return original(worker, batch, *rest, **named)
        finally:
            self.cost.add_round(time.perf_counter() - wall, time.thread_time() - cpu)
            if reqs:  # none: a step that other data-parallel ranks need this one for
                self._observe(lambda live: live.prefilled(reqs) if extends else live.decoded(len(reqs)))

    def _extend(self, original: Callable, worker: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        # the draft's own prefill changes the batch, so what is needed of it is read before
        prefill = self._prefill = self._guarded(self._admit, batch)
        try:
            result = original(worker, batch, *rest, **named)
        finally:
            self._prefill = None
        if prefill is not None:
            self._guarded(self._prefilled, prefill, result.logits_output)
        return result

    def on_sample(
        self, original: Callable, runner: Any, logits: Any, batch: Any, *rest: Any, **named: Any
    ) -> Any:
        """The prefill's logits become probabilities in place here."""
        prefill = self._prefill
        if prefill is None or not prefill.answered:
            return original(runner, logits, batch, *rest, **named)
        places = [prefill.plan[i].place for i in prefill.answered]
        # copied row by row: an index would have to be sent to the device first
        prefill.raw = torch.stack([logits.next_token_logits[place] for place in places])
        ids = original(runner, logits, batch, *rest, **named)
        prefill.drawn = torch.stack([ids[place] for place in places])
        return ids

    def on_verify(
        self,
        original: Callable,
        verify_input: Any,
        batch: Any,
        logits: Any,
        mask: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Sees raw logits before penalties, bias and grammar change them in place."""
        n = verify_input.draft_token_num
        plan = None if batch.forward_mode.is_idle() else self._guarded(self._plan_round, batch)
        if not plan:
            return original(verify_input, batch, logits, mask, *rest, **named)
        raw = logits.next_token_logits
        changed = mask is not None or self.sglang.changes_logits(batch.sampling_info)
        if changed:
            raw = torch.cat([raw[p.place * n : (p.place + 1) * n] for p in plan])
        result = original(verify_input, batch, logits, mask, *rest, **named)
        predict, accept_lens = result[0], result[1]
        step = VerifyStep(plan, n, logits.hidden_states, raw, changed, predict, accept_lens, batch.seq_lens)
        self._guarded(self._verified, step, logits)
        return result

    # ---- the end of a request ----

    def on_output(self, original: Callable, streamer: Any, reqs: list[Any], *rest: Any, **named: Any) -> Any:
        for req in reqs:
            if req.finished():
                self._ended(req, req.finished_reason.to_json()["type"])
        return original(streamer, reqs, *rest, **named)

    def on_send(self, original: Callable, sender: Any, output: Any, req: Any = None) -> Any:
        """Those that are aborted while they wait, or are prefilled."""
        if req is not None and self.sglang.is_abort(output):
            self._ended(req, "abort")
        return original(sender, output, req)

    def _ended(self, req: Any, reason: str) -> None:
        if getattr(req, MARK, None) is not None:
            self._guarded(self._close, req, reason)
        if getattr(req, LIVE, None) is not None and not self.sglang.is_health_check(req):
            tokens = len(req.output_ids_through_stop)
            tenant = self.sglang.read_request(req).tenant
            self._observe(lambda live: live.ended(req, tenant, tokens, reason))

    # ---- what the hooks do ----

    def _observe(self, work: Callable[[Live], object]) -> None:
        """What is watched must not end the server: a fault ends the watching, and the log says so."""
        if self.live is None:
            return
        try:
            work(self.live)
        except Exception:  # see above
            logger.exception("finished requests are not counted until the server is restarted")
            self.live = None

    def _admit(self, batch: Any) -> "_Prefill | None":
        """The captured requests of a prefill batch; decides about those that come for the first time."""
        assert self.capture is not None and self.stager is not None
        for req in batch.reqs:
            if not hasattr(req, MARK):
                # one that has answered already was prefilled while capture was off: its rows would lack some
                wanted = not self.sglang.is_health_check(req) and not len(req.output_ids)
                request = self.sglang.read_request(req) if wanted else None
                admitted = self.capture.admit(request, time.time()) if request else None
                setattr(req, MARK, admitted)
                if admitted is not None:
                    self.stager.run(self.capture.begin, admitted)
        starts, counts = list(batch.prefix_lens), list(batch.extend_lens)
        prefill = _Prefill()
        offset = 0
        for place, req in enumerate(batch.reqs):
            sample: OpenSample | None = getattr(req, MARK)
            if sample is not None and not sample.lost:
                prefill.add(place, sample, req, starts[place], counts[place], offset)
            offset += counts[place]
        return prefill if prefill.plan else None

    def _plan_round(self, batch: Any) -> list[Planned]:
        """The captured requests of a decode batch."""
        plan = []
        for place, req in enumerate(batch.reqs):
            sample: OpenSample | None = getattr(req, MARK, None)
            if sample is not None and not sample.lost:
                prompt, response = req.origin_input_ids, req.output_ids
                plan.append(plan_request(place, sample, prompt, response, len(prompt) + len(response)))
        return plan

    def _verified(self, step: VerifyStep, logits: Any) -> None:
        assert self.stager is not None
        self.stager.stage(replace(step, last=self._last(logits)))

    def _last(self, logits: Any) -> torch.Tensor | None:
        return self.last.of(logits) if self.last_width else None

    def _prefilled(self, prefill: "_Prefill", logits: Any) -> None:
        assert self.stager is not None
        self.stager.stage(
            PrefillStep(
                prefill.plan,
                logits.hidden_states,
                prefill.starts,
                prefill.counts,
                prefill.offsets,
                prefill.answered if prefill.raw is not None else [],
                prefill.raw,
                prefill.drawn,
                self._last(logits) if prefill.raw is not None else None,
            )
        )

    def _close(self, req: Any, reason: str) -> None:
        assert self.stager is not None
        sample: OpenSample = getattr(req, MARK)
        setattr(req, MARK, None)
        # output_ids holds tokens that were accepted past the stop
        prompt, response = req.origin_input_ids, req.output_ids_through_stop
        end = len(prompt) + len(response)
        tail_pos = min(sample.next_token, end)
        ending = Ending(
            tokens=end,
            tail_pos=tail_pos,
            tail=tokens_between(prompt, response, tail_pos, end),
            reason=reason,
            time=time.time(),
            verify_rounds=req.spec_verify_ct,
            accepted_drafts=req.spec_num_correct_drafts,
            retracted=req.retraction_count > 0,
        )
        assert self.capture is not None
        self.stager.run(self.capture.close, sample, ending)

    def _guarded(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Capture must not end the server: a fault in it ends capture, and the status says so."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return work(*arguments)
        except Exception as error:  # see above
            logger.exception("capture failed and is off until the server is restarted")
            self._failed(error)
            return None
        finally:
            self.cost.capture_s += time.perf_counter() - wall
            self.cost.capture_cpu_s += time.thread_time() - cpu


class _Prefill:
    """A prefill batch as it was before SGLang's draft changed it; fields as in :class:`PrefillStep`."""

    def __init__(self) -> None:
        self.plan: list[Planned] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.offsets: list[int] = []
        self.answered: list[int] = []
        self.raw: torch.Tensor | None = None
        self.drawn: torch.Tensor | None = None

    def add(self, place: int, sample: OpenSample, req: Any, start: int, count: int, offset: int) -> None:
        prompt, response, end = req.origin_input_ids, req.output_ids, start + count
        if len(response) and end == len(prompt) + len(response):
            self.answered.append(len(self.plan))
        self.plan.append(plan_request(place, sample, prompt, response, end))
        self.starts.append(start)
        self.counts.append(count)
        self.offsets.append(offset)
