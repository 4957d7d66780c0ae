"""SGLang 0.5.14: which of its functions are hooked under names of its own (the others: ``targets``)."""

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import sglang_0_5_14
from tide_platform.engine.hooks import Hooks
from tide_platform.engine.targets import MANAGERS, SRT, Targets, register, shared_targets


def install(config: EngineConfig) -> None:
    register(config, sglang_0_5_14, targets)


def targets(hooks: Hooks) -> Targets:
    """SGLang function -> hook around it."""
    control = f"{MANAGERS}tokenizer_control_mixin.TokenizerControlMixin."
    return shared_targets(hooks) | {
        f"{SRT}server_args.ServerArgs.__post_init__": hooks.on_server_args,
        f"{MANAGERS}scheduler.Scheduler.set_internal_state": hooks.on_message,
        f"{control}set_internal_state": hooks.on_set_state,
    }
