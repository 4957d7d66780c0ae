"""dagster-k8s's Pipes around training pods. Imports dagster_k8s: imported in functions only."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dagster as dg
import kubernetes
from dagster_k8s import PipesK8sClient
from dagster_k8s.pipes import PipesK8sPodLogsMessageReader
from dagster_k8s.utils import apply_no_proxy_env_workaround

from tide_platform.cluster.access import configuration
from tide_platform.cluster.api import KubeApi, no_answer, refused
from tide_platform.cluster.pods import PodView
from tide_platform.cluster.run import Attempt, create_all
from tide_platform.config.cluster import Cluster

LOG_END_S = 10.0  # after a pod's end, for the rest of its log


class _Ended(Exception):
    """The training has ended well. Leaves PipesK8sClient.run() before it waits for the pod once more: it
    would wait for a day where the pod is removed in between (dagster-k8s 0.29.27).
    """


class Launcher:
    """Implements ``launch`` of :class:`tide_platform.cluster.run.PodTraining`."""

    def __init__(self, context: dg.AssetExecutionContext, cluster: Cluster, api: KubeApi):
        self._context, self._cluster, self._api = context, cluster, api

    def __call__(self, attempt: Attempt) -> None:
        if attempt.manifests.pod is not None:
            _one_pod(self._context, self._cluster, attempt, attempt.manifests.pod)
        else:
            _job(self._context, self._cluster, self._api, attempt)


class WatchedPodClient(PipesK8sClient):
    """Makes the pod and opens the Pipes session as ever; our watcher waits for the pod, with timeouts that
    work, while its log is read beside.
    """

    def __init__(self, cluster: Cluster, attempt: Attempt):
        super().__init__()
        self._cluster, self._attempt = cluster, attempt

    def _load_k8s_config(self) -> None:
        kubernetes.client.Configuration.set_default(configuration(self._cluster))
        apply_no_proxy_env_workaround()

    @contextmanager
    def consume_pod_logs(self, context: Any, client: Any, namespace: str, **_: Any) -> Iterator[None]:
        assert isinstance(self.message_reader, PipesK8sPodLogsMessageReader)
        with _log_reader(self.message_reader, context, client.core_api, namespace) as on_start:
            self._attempt.watch(on_start)
        raise _Ended
        yield  # what makes it a context manager


def _one_pod(context: dg.AssetExecutionContext, cluster: Cluster, attempt: Attempt, pod: Any) -> None:
    client = WatchedPodClient(cluster, attempt)
    meta = {name: pod["metadata"][name] for name in ("labels", "ownerReferences") if name in pod["metadata"]}
    try:
        client.run(
            context=context,
            namespace=cluster.namespace,
            base_pod_meta=meta,
            base_pod_spec=pod["spec"],
            delete_pod_on_completion=False,  # whoever watches removes it, by its labels
        )
    except _Ended:
        return
    except kubernetes.client.ApiException as error:
        # 409: the pod may have been made by a request that was tried again
        silent = no_answer(configuration(cluster).host, error, also=(409,))
        raise silent or refused("the training pod", error) from error


def _job(context: dg.AssetExecutionContext, cluster: Cluster, api: KubeApi, attempt: Attempt) -> None:
    """An Indexed Job within one Pipes session; the first pod reports."""
    reader = PipesK8sPodLogsMessageReader()
    with dg.open_pipes_session(
        context=context, context_injector=dg.PipesEnvContextInjector(), message_reader=reader
    ) as session:
        job = attempt.manifests.job
        assert job is not None
        # all pods get them, the process of rank 0 alone reports
        variables = [{"name": k, "value": v} for k, v in session.get_bootstrap_env_vars().items()]
        job["spec"]["template"]["spec"]["containers"][0]["env"] += variables
        create_all(api, attempt.manifests)
        core = kubernetes.client.CoreV1Api(kubernetes.client.ApiClient(configuration(cluster)))
        with _log_reader(reader, context, core, cluster.namespace) as on_start:
            attempt.watch(on_start)


@contextmanager
def _log_reader(reader: PipesK8sPodLogsMessageReader, context: Any, core_api: Any, namespace: str):
    """``on_start(pod)`` reads the first pod's log in a thread: the rest of it is waited for a little, a log
    that does not end keeps nobody.
    """
    threads: list[threading.Thread] = []

    def read(name: str) -> None:
        try:
            reader.consume_pod_logs(context, core_api, name, namespace)
        except Exception as error:  # noqa: BLE001  the log is for people: training does not depend on it
            context.log.warning(f"the log of pod {name} could not be read to its end: {error}")

    def on_start(view: PodView) -> None:
        if view.index == 0:
            thread = threading.Thread(target=read, args=(view.name,), name=f"log of {view.name}", daemon=True)
            thread.start()
            threads.append(thread)

    try:
        yield on_start
    finally:
        for thread in threads:
            thread.join(LOG_END_S)
