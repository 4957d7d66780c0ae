"""SGLang 0.5.14: which of its functions are hooked.

Hooks, and why there:

* ``eagle_utils.eagle_sample`` sees a verify step's raw logits before penalties, bias and grammar change them
  in place, its hidden states, and what was accepted. Row j of request b is row ``b*n + j``: its input token
  stands at position ``seq_lens[b] + j``, and ``predict`` of it is the token that follows.
* ``EAGLEWorkerV2.forward_batch_generation`` sees the prompt's hidden states: rows ``prefix_lens[b]`` and on.
* ``ModelRunner.sample`` turns the prefill's logits into probabilities in place; they matter only where a
  retracted request is prefilled together with its response.
* ``SchedulerOutputStreamer.stream_output`` sees finished requests; ``SenderWrapper.send_output`` those that
  are aborted while they wait or are prefilled.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.managers import io_struct
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.auth import AuthLevel

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import routes
from tide_platform.engine.capture import Capture, Ending, OpenSample
from tide_platform.engine.control import Control
from tide_platform.engine.sglang_0_5_14 import (
    MESSAGE,
    VERSION,
    Link,
    changes_logits,
    is_health_check,
    open_capture,
    read_request,
    served_draft,
)
from tide_platform.engine.support import check_server, verify_rule
from tide_platform.engine.teacher import TeacherRows, bf16_bits, teacher_rows

logger = logging.getLogger("tide")

# attribute that a request carries: its open sample, or None where it is not captured
MARK = "tide_sample"
REFUSED = "refused: the served target is fixed under TIDE; POST /tide/reload_draft changes the draft"

Plan = list[tuple[int, OpenSample]]  # (place in the batch, sample)


def install(config: EngineConfig) -> None:
    """Registers the hooks; SGLang applies them when all plugins have been called."""
    hooks = Hooks(config)
    for target, hook in hooks.targets().items():
        HookRegistry.register(target, hook, HookType.AROUND)


class Hooks:
    """The hooks of one process; ``control`` exists in scheduler processes only."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.control: Control | None = None
        self.capture: Capture | None = None
        self._prefill: _Prefill | None = None

    def targets(self) -> dict[str, Callable[..., Any]]:
        """SGLang function -> hook around it."""
        srt = "sglang.srt."
        updater = f"{srt}managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        scheduler = f"{srt}managers.scheduler.Scheduler."
        targets: dict[str, Callable[..., Any]] = {
            f"{srt}server_args.ServerArgs.__post_init__": self.on_server_args,
            f"{scheduler}__init__": self.on_scheduler,
            f"{scheduler}set_internal_state": self.on_message,
            f"{srt}managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state": on_set_state,
            f"{srt}managers.tokenizer_manager.TokenizerManager.update_weights_from_disk": refuse_disk_update,
            f"{srt}entrypoints.http_server._setup_and_run_http_server": self.on_http_server,
            f"{srt}utils.auth.add_api_key_middleware": on_key_middleware,
            f"{srt}utils.auth.decide_request_auth": on_key_decision,
        }
        for source in ("disk", "distributed", "tensor", "ipc"):
            targets[f"{updater}update_weights_from_{source}"] = refuse_update
        if self._captures():
            components = f"{srt}managers.scheduler_components."
            worker = f"{srt}speculative.eagle_worker_v2.EAGLEWorkerV2."
            targets |= {
                f"{srt}speculative.eagle_utils.eagle_sample": self.on_verify,
                f"{worker}forward_batch_generation": self.on_forward,
                f"{srt}model_executor.model_runner.ModelRunner.sample": self.on_sample,
                f"{components}output_streamer.SchedulerOutputStreamer.stream_output": self.on_output,
                f"{components}output_sender.SenderWrapper.send_output": self.on_send,
            }
        return targets

    def missing(self) -> list[str]:
        """Hooks that SGLang failed to apply (it logs and goes on)."""
        return sorted(self.targets().keys() - HookRegistry._patched)

    def _captures(self) -> bool:
        return self.config.draft_digest is not None and self.config.ring_path is not None

    # ---- start ----

    def on_server_args(self, original: Callable, args: Any) -> None:
        original(args)
        check_server(args)

    def on_http_server(
        self, original: Callable, server_args: Any, manager: Any, *rest: Any, **named: Any
    ) -> Any:
        from sglang.srt.entrypoints import http_server

        routes.add(http_server.app, Link(manager), self.config, VERSION, server_args, protect)
        return original(server_args, manager, *rest, **named)

    def on_scheduler(self, original: Callable, scheduler: Any, *rest: Any, **named: Any) -> None:
        original(scheduler, *rest, **named)
        config, args = self.config, scheduler.server_args
        rule = verify_rule(config.device, VERSION, bool(args.speculative_use_rejection_sampling))
        served = served_draft(scheduler, config.device) if scheduler.draft_worker is not None else None
        if self._captures() and served and scheduler.ps.attn_tp_rank == 0:
            self.capture = open_capture(config, rule, args.speculative_num_steps)
        self.control = Control(config, VERSION, rule, served, self.capture, self.missing)

    # ---- messages ----

    def on_message(self, original: Callable, scheduler: Any, message: Any) -> Any:
        if MESSAGE not in message.server_args:
            return original(scheduler, message)
        assert self.control is not None
        return io_struct.SetInternalStateReqOutput(True, self.control.handle(message.server_args[MESSAGE]))

    # ---- capture ----

    def _admit(self, batch: Any) -> Plan:
        """The captured requests of a prefill batch; decides about those that come for the first time."""
        assert self.capture is not None
        for req in batch.reqs:
            if not hasattr(req, MARK):
                # one that has answered already was prefilled while capture was off: its rows would lack some
                wanted = not is_health_check(req) and not req.output_ids
                setattr(req, MARK, self.capture.admit(read_request(req)) if wanted else None)
        return self._plan(batch)

    def _plan(self, batch: Any) -> Plan:
        """The captured requests of a batch."""
        marks = ((place, getattr(req, MARK, None)) for place, req in enumerate(batch.reqs))
        return [(place, sample) for place, sample in marks if sample is not None and not sample.lost]

    def on_verify(
        self, original: Callable, verify_input: Any, batch: Any, logits: Any, vocab_mask: Any = None
    ) -> Any:
        plan = self._plan(batch)
        if not plan or batch.forward_mode.is_idle():
            return original(verify_input, batch, logits, vocab_mask)
        n = verify_input.draft_token_num
        raw = logits.next_token_logits
        first = {place: place * n for place, _ in plan}  # of each request's rows in raw
        if vocab_mask is not None or changes_logits(batch.sampling_info):
            raw = torch.cat([raw[place * n : (place + 1) * n] for place, _ in plan])
            first = {place: order * n for order, (place, _) in enumerate(plan)}
        result = original(verify_input, batch, logits, vocab_mask)
        self._guarded(self._verified, plan, first, n, raw, batch, logits.hidden_states, result)
        return result

    def _verified(
        self,
        plan: Plan,
        first: dict[int, int],
        n: int,
        raw: torch.Tensor,
        batch: Any,
        hidden: Any,
        result: Any,
    ) -> None:
        assert self.capture is not None
        predict, accept_lens, _ = result
        starts, lengths = batch.seq_lens.tolist(), accept_lens.tolist()
        counts = [lengths[place] for place, _ in plan]
        rows = torch.cat([torch.arange(place * n, place * n + lengths[place]) for place, _ in plan])
        raw_rows = torch.cat([torch.arange(first[place], first[place] + lengths[place]) for place, _ in plan])
        rows, raw_rows = rows.to(hidden.device), raw_rows.to(raw.device)
        aux = bf16_bits(hidden[rows])
        teacher = teacher_rows(raw[raw_rows], self.config.teacher_k, predict[rows])
        at = 0
        for (place, sample), count in zip(plan, counts, strict=True):
            of = slice(at, at + count)
            self.capture.write(sample, starts[place], aux[of], starts[place], teacher[of])
            at += count

    def on_forward(self, original: Callable, worker: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        prefills = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if self.capture is None or not prefills:
            return original(worker, batch, *rest, **named)
        plan = self._guarded(self._admit, batch) or []
        if not plan:
            return original(worker, batch, *rest, **named)
        # the draft's own prefill changes the batch, so what is needed of it is read before
        prefill = _Prefill(plan, list(batch.prefix_lens), list(batch.extend_lens), batch.reqs)
        self._prefill = prefill if prefill.within_response else None
        try:
            result = original(worker, batch, *rest, **named)
        finally:
            self._prefill = None
        self._guarded(self._prefilled, prefill, result.logits_output.hidden_states)
        return result

    def on_sample(
        self, original: Callable, runner: Any, logits: Any, batch: Any, *rest: Any, **named: Any
    ) -> Any:
        prefill = self._prefill
        if prefill is None:
            return original(runner, logits, batch, *rest, **named)
        raw = logits.next_token_logits[prefill.within_response]  # indexing copies
        ids = original(runner, logits, batch, *rest, **named)
        prefill.teacher = teacher_rows(raw, self.config.teacher_k, ids[prefill.within_response])
        return ids

    def _prefilled(self, prefill: "_Prefill", hidden: torch.Tensor) -> None:
        assert self.capture is not None
        for place, sample in prefill.plan:
            start, count, offset = prefill.starts[place], prefill.counts[place], prefill.offset(place)
            aux = bf16_bits(hidden[offset : offset + count])
            teacher = TeacherRows.none(self.config.teacher_k)
            if prefill.teacher is not None and place in prefill.within_response:
                order = prefill.within_response.index(place)
                teacher = prefill.teacher[order : order + 1]
            self.capture.write(sample, start, aux, start + count - 1, teacher)

    # ---- end of a request ----

    def on_output(self, original: Callable, streamer: Any, reqs: list[Any], *rest: Any, **named: Any) -> Any:
        for req in reqs:
            if getattr(req, MARK, None) is not None and req.finished():
                self._guarded(self._close, req, req.finished_reason.to_json()["type"])
        return original(streamer, reqs, *rest, **named)

    def on_send(self, original: Callable, sender: Any, output: Any, req: Any = None) -> Any:
        if isinstance(output, io_struct.AbortReq) and getattr(req, MARK, None) is not None:
            self._guarded(self._close, req, "abort")
        return original(sender, output, req)

    def _close(self, req: Any, reason: str) -> None:
        assert self.capture is not None
        sample = getattr(req, MARK)
        setattr(req, MARK, None)
        # output_ids holds tokens that were accepted past the stop
        ids = np.array([*req.origin_input_ids, *req.output_ids_through_stop], np.int32)
        ending = Ending(
            input_ids=ids,
            reason=reason,
            time=time.time(),
            verify_rounds=req.spec_verify_ct,
            accepted_drafts=req.spec_num_correct_drafts,
            retracted=req.retraction_count > 0,
        )
        self.capture.close(sample, ending)

    def _guarded(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Capture must not end the server: a fault in it ends capture, and the status says so."""
        try:
            return work(*arguments)
        except Exception as error:  # see above
            logger.exception("capture failed and is off until the server is restarted")
            assert self.control is not None
            self.control.fail_capture(error)
            return None


class _Prefill:
    """A prefill batch as it was before SGLang's draft changed it."""

    def __init__(self, plan: Plan, starts: list[int], counts: list[int], reqs: list[Any]):
        self.plan, self.starts, self.counts = plan, starts, counts
        # places whose last row is within the response, its successor yet to be drawn: retracted requests
        self.within_response = [place for place, _ in plan if self._at_the_end(place, reqs[place])]
        self.teacher: TeacherRows | None = None

    def _at_the_end(self, place: int, req: Any) -> bool:
        end = self.starts[place] + self.counts[place]
        return bool(req.output_ids) and end == len(req.origin_input_ids) + len(req.output_ids)

    def offset(self, place: int) -> int:
        return sum(self.counts[:place])


def on_set_state(original: Callable, manager: Any, message: Any) -> Any:
    """SGLang's own route must not reach the plugin past the plugin's checks."""
    if MESSAGE in message.server_args:
        raise ValueError(f"{MESSAGE!r} is not set through /set_internal_state; see the /tide routes")
    return original(manager, message)


def on_key_middleware(original: Callable, app: Any, *, api_key: str | None, admin_api_key: str | None) -> Any:
    """SGLang's admin routes ask for the key of the environment as well.

    The key is kept out of ServerArgs: SGLang prints those, and ``/server_info`` shows them to anyone.
    """
    return original(app, api_key=api_key, admin_api_key=admin_api_key or routes.environment_key())


def on_key_decision(original: Callable, *, authorization_header: str | None, **named: Any) -> Any:
    """SGLang's comparison raises on a header that is not ASCII; such a header holds no key."""
    header = authorization_header if authorization_header and authorization_header.isascii() else None
    return original(authorization_header=header, **named)


def protect(route: Any) -> None:
    route._auth_level = AuthLevel.ADMIN_FORCE


async def refuse_disk_update(original: Callable, manager: Any, *rest: Any, **named: Any) -> Any:
    """Refused before SGLang drains all requests for it."""
    return False, REFUSED, 0


def refuse_update(original: Callable, updater: Any, message: Any) -> Any:
    """The target is fixed: samples and digests speak of it. SGLang would load a draft into it."""
    outputs = {
        io_struct.UpdateWeightFromDiskReqInput: io_struct.UpdateWeightFromDiskReqOutput,
        io_struct.UpdateWeightsFromDistributedReqInput: io_struct.UpdateWeightsFromDistributedReqOutput,
        io_struct.UpdateWeightsFromTensorReqInput: io_struct.UpdateWeightsFromTensorReqOutput,
        io_struct.UpdateWeightsFromIPCReqInput: io_struct.UpdateWeightsFromIPCReqOutput,
    }
    return outputs[type(message)](False, REFUSED)
