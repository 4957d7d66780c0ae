"""SGLang 0.5.23: what its objects mean to the plugin, and the channel between its two processes.

Its messages are typed (msgspec): an internal-state message carries numbers only, a dumper message any JSON
object, so the plugin's channel is the dumper's, under a method of its own.
"""

from typing import Any

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.managers import io_struct
from sglang.srt.runtime_context import get_parallel

from tide_platform.engine import sglang_common
from tide_platform.engine.data_ranks import in_order
from tide_platform.engine.hooks import MESSAGE
from tide_platform.engine.sglang_common import (
    InPlacePause,
    application,
    is_abort,
    is_health_check,
    protect,
    read_request,
    refused,
    served_draft,
)

__all__ = [
    "VERSION",
    "answer",
    "application",
    "arguments",
    "asked",
    "changes_logits",
    "data_rank",
    "is_abort",
    "is_health_check",
    "link",
    "protect",
    "read_request",
    "refused_update",
    "served_draft",
    "writes",
]

VERSION: str = "0.5.23"


class Link(InPlacePause):
    """The HTTP process's end of the channel to the schedulers, and the in-place pause."""

    async def call(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.manager.auto_create_handle_loop()
        replies = await self.manager.dumper_control_communicator(
            io_struct.DumperControlReqInput(method=MESSAGE, body=message)
        )
        return in_order([reply.response[0] for reply in replies])

    async def resume(self) -> None:
        await self.manager.continue_generation(io_struct.ContinueGenerationReqInput(torch_empty_cache=False))


def link(manager: Any) -> Link:
    return Link(manager)


def arguments(args: Any) -> Any:
    """The record holds what was asked for; what SGLang made of it lies over it."""
    return resolved_view(args)


def asked(message: Any) -> dict[str, Any] | None:
    return message.body if message.method == MESSAGE else None


def answer(payload: dict[str, Any]) -> Any:
    return io_struct.DumperControlReqOutput(success=True, response=[payload])


def refused_update(message: Any, why: str) -> Any:
    session = {io_struct.BeginWeightUpdateReqInput: io_struct.BeginWeightUpdateReqOutput}
    return refused(message, why, session)


def writes(owner: Any) -> bool:
    """Attention-TP rank 0: the states are the same on every rank of a data-parallel rank's group."""
    return get_parallel().attn_tp_rank == 0


def data_rank(scheduler: Any) -> tuple[int, int]:
    """Replicas and attention's ranks are counted apart; one of the two is one."""
    parallel = get_parallel()
    return (parallel.dp_rank or 0) * parallel.attn_dp_size + parallel.attn_dp_rank, parallel.num_dp_ranks


def changes_logits(sampling: Any) -> bool:
    """As before, and a watermark, which is written into the logits as well."""
    return sglang_common.changes_logits(sampling) or bool(sampling.has_watermark_candidates)
