"""SGLang 0.5.14: what its objects mean to the plugin, and the channel between its two processes."""

from typing import Any

from sglang.srt.layers.dp_attention import get_attention_tp_rank
from sglang.srt.managers import io_struct

from tide_platform.engine.data_ranks import in_order
from tide_platform.engine.hooks import MESSAGE
from tide_platform.engine.sglang_common import (
    InPlacePause,
    application,
    changes_logits,
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

VERSION: str = "0.5.14"


class Link(InPlacePause):
    """The HTTP process's end of the channel to the schedulers, and the in-place pause."""

    async def call(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        self.manager.auto_create_handle_loop()
        replies = await self.manager.set_internal_state_communicator(
            io_struct.SetInternalStateReq({MESSAGE: message})
        )
        return in_order([reply.server_args for reply in replies])

    async def resume(self) -> None:
        await self.manager.continue_generation(io_struct.ContinueGenerationReqInput())


def link(manager: Any) -> Link:
    return Link(manager)


def arguments(args: Any) -> Any:
    return args


def asked(message: Any) -> dict[str, Any] | None:
    return message.server_args.get(MESSAGE)


def answer(payload: dict[str, Any]) -> Any:
    return io_struct.SetInternalStateReqOutput(True, payload)


def refused_update(message: Any, why: str) -> Any:
    return refused(message, why)


def writes(owner: Any) -> bool:
    """Attention-TP rank 0: the states are the same on every rank of a data-parallel rank's group."""
    return owner.ps.attn_tp_rank == 0 if hasattr(owner, "ps") else get_attention_tp_rank() == 0


def data_rank(scheduler: Any) -> tuple[int, int]:
    return scheduler.ps.dp_rank or 0, scheduler.server_args.dp_size
