"""SGLang 0.5.14: what its objects mean to the plugin, and the channel between its two processes."""

from pathlib import Path
from typing import Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from tide_platform.capture.record import StreamMeta
from tide_platform.capture.ring import Ring, RingWriter
from tide_platform.config.engine import EngineConfig
from tide_platform.engine.capture import Capture, Origin, Policy, Request
from tide_platform.engine.reload import ServedDraft

VERSION = "0.5.14"
# in the internal-state message between SGLang's HTTP process and its scheduler
MESSAGE = "tide"


class Link:
    """The HTTP process's end of the channel to the scheduler, and the in-place pause."""

    def __init__(self, manager: Any):
        self.manager = manager

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        self.manager.auto_create_handle_loop()
        replies = await self.manager.set_internal_state_communicator(
            io_struct.SetInternalStateReq({MESSAGE: message})
        )
        return replies[0].server_args

    def paused(self) -> bool:
        return bool(self.manager.is_pause)

    async def pause(self) -> None:
        await self.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))

    async def resume(self) -> None:
        await self.manager.continue_generation(io_struct.ContinueGenerationReqInput())


def served_draft(scheduler: Any, device: str) -> ServedDraft:
    """Finds the models in a scheduler with an EAGLE3 worker."""
    worker = scheduler.draft_worker._draft_worker
    runner = worker.draft_runner
    model = runner.model

    def load(named: Any) -> None:
        with set_default_torch_dtype(runner.model_config.dtype), torch.no_grad():
            DefaultModelLoader.load_weights_and_postprocess(model, iter(named), torch.device(runner.device))

    def after_load() -> None:
        if device == "cpu":
            from tide_platform.engine import cpu

            cpu.unpack(model)

    def gather(value: Any) -> list[Any]:
        size = torch.distributed.get_world_size(group=scheduler.tp_cpu_group)
        if size == 1:
            return [value]
        values: list[Any] = [None] * size
        torch.distributed.all_gather_object(values, value, group=scheduler.tp_cpu_group)
        return values

    has_map = model.hot_token_id is not None
    return ServedDraft(
        target=scheduler.tp_worker.model_runner.model,
        draft=model,
        load=load,
        vocabulary_holders=[(model, "hot_token_id"), (worker, "hot_token_id")] if has_map else [],
        after_load=after_load,
        gather=gather,
    )


def open_capture(config: EngineConfig, rule: str, k: int) -> Capture:
    """Makes the ring, and the capture that writes to it."""
    stream = StreamMeta(
        target_digest=config.target_digest,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        aux_layer_ids=tuple(config.aux_layer_ids),
        teacher_k=config.teacher_k,
    )
    assert config.ring_path is not None and config.draft_digest is not None
    writer = RingWriter(Ring.create(Path(config.ring_path), config.ring_bytes, stream))
    policy = Policy(
        config.capture_enabled, config.capture_default, config.sampling_rate, frozenset(config.deny_tenants)
    )
    origin = Origin(config.target_digest, rule, f"sglang-{VERSION}")
    return Capture(writer, policy, origin, config.draft_digest, k)


def is_health_check(req: Any) -> bool:
    return str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)


def read_request(req: Any) -> Request:
    """What capture needs of SGLang's request. SGLang writes temperature 0 as top_k 1."""
    params = req.sampling_params
    custom = params.custom_params if isinstance(params.custom_params, dict) else {}
    options = custom.get("tide")
    greedy = params.top_k == 1
    return Request(
        rid=str(req.rid),
        prompt_tokens=len(req.origin_input_ids),
        temperature=0.0 if greedy else float(params.temperature),
        top_p=float(params.top_p),
        top_k=-1 if params.top_k == TOP_K_ALL else int(params.top_k),
        penalties=bool(
            params.frequency_penalty
            or params.presence_penalty
            or params.repetition_penalty != 1.0
            or params.min_new_tokens
            or params.logit_bias
            or req.custom_logit_processor
        ),
        grammar=req.grammar is not None,
        unsupported=_unsupported(req),
        options=options if isinstance(options, dict) else {},
    )


def _unsupported(req: Any) -> str | None:
    if getattr(req, "lora_id", None):
        return "lora"
    if getattr(req, "multimodal_inputs", None) is not None:
        return "multimodal"
    return "input_embeds" if getattr(req, "input_embeds", None) is not None else None


def changes_logits(sampling: Any) -> bool:
    """Whether SGLang adds penalties or bias to a verify step's logits in place."""
    added = (sampling.acc_additive_penalties, sampling.acc_scaling_penalties, sampling.logit_bias)
    return any(part is not None for part in added)
