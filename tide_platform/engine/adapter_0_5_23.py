"""SGLang 0.5.23: which of its functions are hooked under names of its own (the others: ``targets``).

What differs from 0.5.14:

* ``ServerArgs.__post_init__`` leaves everything open; ``resolve_once`` decides, some processes later.
* The plugin's messages go by the dumper's channel (``sglang_0_5_23``).
* Weights are updated in sessions: their start is refused.
* ``eagle_sample`` takes a grammar mask that is an object, and more arguments.
"""

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import sglang_0_5_23
from tide_platform.engine.hooks import Hooks
from tide_platform.engine.targets import MANAGERS, SRT, UPDATER, Targets, register, shared_targets


def install(config: EngineConfig) -> None:
    register(config, sglang_0_5_23, targets)


def targets(hooks: Hooks) -> Targets:
    """SGLang function -> hook around it."""
    control = f"{MANAGERS}tokenizer_control_mixin.TokenizerControlMixin."
    return shared_targets(hooks) | {
        f"{SRT}server_args.ServerArgs.resolve_once": hooks.on_server_args,
        f"{MANAGERS}scheduler.Scheduler.handle_dumper_control": hooks.on_message,
        f"{control}dumper_control": hooks.on_set_state,
        f"{UPDATER}begin_weight_update": hooks.on_update,
    }
