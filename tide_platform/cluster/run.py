"""One training run in pods: started, watched, started again, and nothing left of it at the end."""

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.cluster.api import KubeApi
from tide_platform.cluster.failures import FailureFiles
from tide_platform.cluster.faults import ApiUnavailable, ManifestRefused
from tide_platform.cluster.leftovers import remove_and_wait, remove_earlier, remove_leftovers
from tide_platform.cluster.manifests import Manifests, RunLabels, manifests, owner
from tide_platform.cluster.outcome import RESULT_WAIT_S, StepFollower, read_result
from tide_platform.cluster.pods import PodView
from tide_platform.cluster.policy import on_gpu, with_policy
from tide_platform.cluster.shared import check_shared
from tide_platform.cluster.watcher import Limits, Watch
from tide_platform.config.cluster import Cluster, TrainerPods
from tide_platform.training.job import TrainJob

Say = Callable[[str], None]


@dataclass(frozen=True)
class Attempt:
    """What a launcher is given: it creates the manifests, then calls ``watch``, which returns when the
    training has ended well and raises otherwise. ``on_start`` is told of each pod whose container started.
    """

    manifests: Manifests
    watch: Callable[[Callable[[PodView], None]], None]


@dataclass(frozen=True)
class PodTraining:
    """``tide train --job FILE`` in pods. ``launch`` creates an attempt's manifests and watches."""

    cluster: Cluster
    pods: TrainerPods
    api: KubeApi
    labels: RunLabels
    launch: Callable[[Attempt], None]
    say: Say
    limits: Limits | None = None  # None: those of the configuration

    def __call__(
        self, job: Path, on_step: Callable[[dict[str, Any]], None], stop: Callable[[], bool]
    ) -> None:
        """Raises the faults of :mod:`tide_platform.cluster.faults`, and
        :class:`~tide_platform.cluster.shared.NotShared`.
        """
        read = TrainJob.read(job)
        check_shared(self.pods, job, read)
        own = self.labels.run_id
        remove_leftovers(
            self.api, self.labels.deployment, lambda run: run == own, self.say, self.labels.window
        )
        if self.pods.gpus:
            on_gpu(job)
        follower = StepFollower(read.out, on_step)

        def attempt(number: int) -> None:
            if number > 1:
                remove_earlier(self.api, self.labels.of_run(), self.say, stop, self._limits.api)
            failures = FailureFiles(read.out)
            with self._removed():
                self.launch(self._attempt(number, job, follower, failures, stop))
            follower.finish(read_result(read.out, RESULT_WAIT_S))

        with_policy(self.pods, job, attempt, self.say)

    @property
    def _limits(self) -> Limits:
        return self.limits or Limits(self.pods.schedule_timeout_s, self.pods.start_timeout_s)

    def _attempt(
        self,
        number: int,
        job: Path,
        follower: StepFollower,
        failures: FailureFiles,
        stop: Callable[[], bool],
    ) -> Attempt:
        owners = owner(self.cluster.namespace)
        made = manifests(self.cluster, self.pods, self.labels, number, job, owners)
        labels = self.labels.of_attempt(number)

        def watch(on_start: Callable[[PodView], None]) -> None:
            Watch(
                self.api,
                labels,
                self.pods.nodes,
                self._limits,
                self.say,
                follower.poll,
                stop,
                on_start,
                failures.read,
                self.pods.processes_per_pod,
            ).run()

        return Attempt(made, watch)

    @contextmanager
    def _removed(self):
        """Whatever ends the block, interrupts too, ends the run's pods."""
        try:
            yield
        finally:
            failing = sys.exc_info()[0] is not None
            try:
                remove_and_wait(self.api, self.labels.of_run(), self.say)
            except (ApiUnavailable, ManifestRefused) as error:
                self.say(f"the run's pods could not be removed, whoever starts next does it: {error}")
                if not failing:
                    raise


def create_all(api: KubeApi, made: Manifests) -> None:
    """Raises what :meth:`KubeApi.create` raises."""
    for manifest in (made.service, made.job, made.pod):
        if manifest is not None:
            api.create(manifest)
