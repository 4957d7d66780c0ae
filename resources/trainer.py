"""``tide train`` through Dagster Pipes: a process beside the run, or pods of a cluster."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from resources.trainer_pods import pods_command
from tide_platform.config import load_settings

if TYPE_CHECKING:
    from tide_platform.control.cycle import TrainCommand


class Trainer(dg.ConfigurableResource):
    """Runs the same command beside the run, or in pods where the configuration has ``cluster.trainer``."""

    def command(self, context: dg.AssetExecutionContext) -> "TrainCommand":
        """``tide train --job FILE`` within this step's Pipes session."""
        cluster = load_settings().cluster
        # through the executor this step is in the trainer's pod already
        if cluster is not None and cluster.trainer is not None and cluster.trainer.through == "pipes":
            return pods_command(context, cluster, cluster.trainer)
        from tide_platform.cluster.policy import on_gpu
        from tide_platform.control.trainer_process import run_trainer

        def run(job: Path, on_step: Callable[[dict[str, Any]], None], stop: Callable[[], bool]) -> None:
            if cluster is not None and cluster.trainer is not None and cluster.trainer.gpus:
                on_gpu(job)
            with dg.open_pipes_session(
                context=context,
                context_injector=dg.PipesTempFileContextInjector(),
                message_reader=dg.PipesTempFileMessageReader(),
            ) as session:
                tide = Path(sys.executable).with_name("tide")
                argv = [str(tide), "train", "--job", str(job)]
                run_trainer(argv, session.get_bootstrap_env_vars(), on_step, stop)

        return run
