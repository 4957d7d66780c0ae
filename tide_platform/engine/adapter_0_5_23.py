"""SGLang 0.5.23: which of its functions are hooked. What differs from 0.5.14, where the reasons stand:

* ``ServerArgs.__post_init__`` leaves everything open; ``resolve_once`` decides, some processes later.
* The plugin's messages go by the dumper's channel (``sglang_0_5_23``).
* Weights are updated in sessions: their start is refused.
* ``eagle_sample`` takes a grammar mask that is an object, and more arguments.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import sglang_0_5_23
from tide_platform.engine.hooks import Hooks


def install(config: EngineConfig) -> None:
    """Registers the hooks; SGLang applies them when all plugins have been called."""
    hooks = Hooks(config, sglang_0_5_23, lambda: sorted(targets(hooks).keys() - HookRegistry._patched))
    for target, hook in targets(hooks).items():
        HookRegistry.register(target, hook, HookType.AROUND)


def targets(hooks: Hooks) -> dict[str, Callable[..., Any]]:
    """SGLang function -> hook around it."""
    srt = "sglang.srt."
    managers = f"{srt}managers."
    updater = f"{managers}scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    named: dict[str, Callable[..., Any]] = {
        f"{srt}server_args.ServerArgs.resolve_once": hooks.on_server_args,
        f"{managers}scheduler.Scheduler.__init__": hooks.on_scheduler,
        f"{managers}scheduler.Scheduler.handle_dumper_control": hooks.on_message,
        f"{managers}tokenizer_control_mixin.TokenizerControlMixin.dumper_control": hooks.on_set_state,
        f"{managers}tokenizer_manager.TokenizerManager.update_weights_from_disk": hooks.on_disk_update,
        f"{updater}begin_weight_update": hooks.on_update,
        f"{srt}entrypoints.http_server._setup_and_run_http_server": hooks.on_http_server,
        f"{srt}utils.auth.add_api_key_middleware": hooks.on_key_middleware,
        f"{srt}utils.auth.decide_request_auth": hooks.on_key_decision,
    }
    for source in ("disk", "distributed", "tensor", "ipc"):
        named[f"{updater}update_weights_from_{source}"] = hooks.on_update
    if hooks.captures():
        chat = f"{srt}entrypoints.openai.serving_chat.OpenAIServingChat."
        worker = f"{srt}speculative.eagle_worker_v2.EAGLEWorkerV2."
        components = f"{managers}scheduler_components."
        named |= {
            f"{managers}tokenizer_manager.TokenizerManager.generate_request": hooks.on_generate,
            f"{chat}_convert_to_internal_request": hooks.on_chat,
            f"{srt}speculative.eagle_utils.eagle_sample": hooks.rows.on_verify,
            f"{worker}forward_batch_generation": hooks.rows.on_forward,
            f"{srt}model_executor.model_runner.ModelRunner.alloc_memory_pool": hooks.on_memory_pool,
            f"{srt}model_executor.model_runner.ModelRunner.sample": hooks.rows.on_sample,
            f"{components}output_streamer.SchedulerOutputStreamer.stream_output": hooks.rows.on_output,
            f"{components}output_sender.SenderWrapper.send_output": hooks.rows.on_send,
        }
    return named
