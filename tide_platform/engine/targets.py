"""Which of SGLang's functions are hooked, where the supported versions agree, and how hooks are registered.

Why there:

* ``eagle_utils.eagle_sample`` sees a verify step's raw logits before penalties, bias and grammar change them
  in place, its hidden states, and what was accepted.
* ``EAGLEWorkerV2.forward_batch_generation`` sees the prompt's hidden states: rows ``prefix_lens[b]`` and on.
* ``ModelRunner.sample`` turns the prefill's logits into probabilities in place; they matter only where a
  retracted request is prefilled together with its response.
* ``LogitsProcessor.forward`` sees the final states that the head multiplies; hooked where they are captured.
* ``SchedulerOutputStreamer.stream_output`` sees finished requests; ``SenderWrapper.send_output`` those that
  are aborted while they wait or are prefilled.
* ``TokenizerManager.generate_request`` sees each request together with its HTTP headers;
  ``OpenAIServingChat._convert_to_internal_request`` a chat's tools.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from tide_platform.config.engine import EngineConfig
from tide_platform.engine.hooks import Hooks

Targets = dict[str, Callable[..., Any]]  # SGLang function -> hook around it

SRT = "sglang.srt."
MANAGERS = f"{SRT}managers."
UPDATER = f"{MANAGERS}scheduler_components.weight_updater.SchedulerWeightUpdaterManager."


def register(config: EngineConfig, sglang: Any, targets: Callable[[Hooks], Targets]) -> None:
    """Registers a version's hooks; SGLang applies them when all plugins have been called."""
    hooks = Hooks(config, sglang, lambda: sorted(targets(hooks).keys() - HookRegistry._patched))
    for target, hook in targets(hooks).items():
        HookRegistry.register(target, hook, HookType.AROUND)


def shared_targets(hooks: Hooks) -> Targets:
    """What is hooked under the same name in each version."""
    named: Targets = {
        f"{MANAGERS}scheduler.Scheduler.__init__": hooks.on_scheduler,
        f"{MANAGERS}tokenizer_manager.TokenizerManager.update_weights_from_disk": hooks.on_disk_update,
        f"{SRT}entrypoints.http_server._setup_and_run_http_server": hooks.on_http_server,
        f"{SRT}utils.auth.add_api_key_middleware": hooks.on_key_middleware,
        f"{SRT}utils.auth.decide_request_auth": hooks.on_key_decision,
    }
    for source in ("disk", "distributed", "tensor", "ipc"):
        named[f"{UPDATER}update_weights_from_{source}"] = hooks.on_update
    worker = f"{SRT}speculative.eagle_worker_v2.EAGLEWorkerV2."
    components = f"{MANAGERS}scheduler_components."
    if hooks.watches():
        named |= {
            f"{MANAGERS}tokenizer_manager.TokenizerManager.generate_request": hooks.on_generate,
            f"{worker}forward_batch_generation": hooks.rows.on_forward,
            f"{components}output_streamer.SchedulerOutputStreamer.stream_output": hooks.rows.on_output,
            f"{components}output_sender.SenderWrapper.send_output": hooks.rows.on_send,
        }
    if hooks.captures():
        chat = f"{SRT}entrypoints.openai.serving_chat.OpenAIServingChat."
        named |= {
            f"{chat}_convert_to_internal_request": hooks.on_chat,
            f"{SRT}speculative.eagle_utils.eagle_sample": hooks.rows.on_verify,
            f"{SRT}model_executor.model_runner.ModelRunner.alloc_memory_pool": hooks.on_memory_pool,
            f"{SRT}model_executor.model_runner.ModelRunner.sample": hooks.rows.on_sample,
        }
        if hooks.config.last_width:
            named[f"{SRT}layers.logits_processor.LogitsProcessor.forward"] = hooks.rows.last.on_logits
    return named
