"""What SGLang's objects mean to the plugin, where the supported versions agree."""

from typing import Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers import io_struct
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils.auth import AuthLevel

from tide_platform.engine.policy import Request
from tide_platform.engine.reload import ServedDraft


class InPlacePause:
    """The HTTP process's own view of its pause; a version's ``Link`` adds the channel to the scheduler."""

    def __init__(self, manager: Any):
        self.manager = manager

    def paused(self) -> bool:
        return bool(self.manager.is_pause)

    async def pause(self) -> None:
        await self.manager.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))


def refused(message: Any, why: str, more: dict[type, type] | None = None) -> Any:
    """The answer to a weight update; ``more`` are the messages that one version alone has."""
    outputs: dict[type, type] = {
        io_struct.UpdateWeightFromDiskReqInput: io_struct.UpdateWeightFromDiskReqOutput,
        io_struct.UpdateWeightsFromDistributedReqInput: io_struct.UpdateWeightsFromDistributedReqOutput,
        io_struct.UpdateWeightsFromTensorReqInput: io_struct.UpdateWeightsFromTensorReqOutput,
        io_struct.UpdateWeightsFromIPCReqInput: io_struct.UpdateWeightsFromIPCReqOutput,
    }
    return (outputs | (more or {}))[type(message)](success=False, message=why)


def application() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server.app


def protect(route: Any) -> None:
    route._auth_level = AuthLevel.ADMIN_FORCE


def is_abort(output: Any) -> bool:
    return isinstance(output, io_struct.AbortReq)


def served_draft(scheduler: Any, device: str) -> ServedDraft | None:
    """Finds the models in a scheduler with an EAGLE3 worker."""
    if scheduler.draft_worker is None:
        return None
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
        thinking=bool(req.require_reasoning),
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
