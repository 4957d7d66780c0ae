"""``tide train`` in pods, through Dagster Pipes: chosen by the ``cluster.trainer`` section."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

from resources.runs import DagsterRuns
from tide_platform.config import Settings
from tide_platform.config.cluster import Cluster, TrainerPods
from tide_platform.control.states import WindowKey

if TYPE_CHECKING:
    from tide_platform.control.cycle import TrainCommand


def pods_command(context: dg.AssetExecutionContext, cluster: Cluster, pods: TrainerPods) -> "TrainCommand":
    """``tide train --job FILE`` in this step's pods; the run's log tells what becomes of them."""

    def run(job: Path, on_step: Callable[[dict[str, Any]], None], stop: Callable[[], bool]) -> None:
        from resources.pipes_pods import Launcher
        from tide_platform.cluster.api import KubeApi
        from tide_platform.cluster.manifests import RunLabels
        from tide_platform.cluster.run import PodTraining

        key = WindowKey.parse(context.partition_key)
        labels = RunLabels(key.deployment, key.window, context.run.run_id)
        with KubeApi(cluster) as api:
            launch = Launcher(context, cluster, api)
            PodTraining(cluster, pods, api, labels, launch, context.log.info)(job, on_step, stop)

    return run


def remove_pods_left_behind(settings: Settings, runs: DagsterRuns, say: Callable[[str], None]) -> None:
    """Training pods of this deployment whose run is over, or unknown to Dagster.

    Without ``cluster.trainer`` there is nothing to look for. Raises what the cluster's API raises.
    """
    if settings.cluster is None or settings.cluster.trainer is None:
        return
    from tide_platform.cluster.api import KubeApi
    from tide_platform.cluster.leftovers import remove_leftovers

    def alive(run_id: str) -> bool:
        view = runs.get(run_id)
        return view is not None and view.status in ("queued", "starting", "started")

    with KubeApi(settings.cluster) as api:
        remove_leftovers(api, settings.deployment, alive, say, wait=False)
