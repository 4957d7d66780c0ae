"""``tide train`` in a process of its own, through Dagster Pipes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from tide_platform.control.cycle import TrainCommand


class Trainer(dg.ConfigurableResource):
    """Starts the trainer beside the run; a cluster's trainer runs the same command in a pod."""

    def command(self, context: dg.AssetExecutionContext) -> "TrainCommand":
        """``tide train --job FILE`` within this step's Pipes session."""
        from tide_platform.control.trainer_process import run_trainer

        def run(job: Path, on_step: Callable[[dict[str, Any]], None], stop: Callable[[], bool]) -> None:
            with dg.open_pipes_session(
                context=context,
                context_injector=dg.PipesTempFileContextInjector(),
                message_reader=dg.PipesTempFileMessageReader(),
            ) as session:
                tide = Path(sys.executable).with_name("tide")
                argv = [str(tide), "train", "--job", str(job)]
                run_trainer(argv, session.get_bootstrap_env_vars(), on_step, stop)

        return run
