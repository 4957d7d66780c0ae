"""The way to the Kubernetes API, and what it says when it does not answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tide_platform.config import TideError
from tide_platform.config.cluster import Cluster

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

REQUEST_S = 15.0  # of one question; what hangs longer is cut off somewhere
RETRIES, BACKOFF_S = 5, 0.2
BUSY = (429, 500, 502, 503, 504)


class NoClusterAccess(TideError):
    """Nothing says where the API is."""

    def __init__(self, cluster: Cluster, detail: str):
        where, mend = "the pod's service account", "run in a pod that has one, or set cluster.kubeconfig"
        if cluster.kubeconfig:
            where, mend = f"cluster.kubeconfig {cluster.kubeconfig}", "see to the file and cluster.context"
        super().__init__(f"no way to the Kubernetes API by {where}: {detail}; {mend}")
        self.kubeconfig, self.detail = cluster.kubeconfig, detail


class ClusterUnreachable(TideError):
    """The API does not answer."""

    def __init__(self, what: str, detail: str):
        super().__init__(
            f"{what}: the Kubernetes API does not answer ({detail}); check the network (a "
            "NetworkPolicy?) and cluster.kubeconfig"
        )
        self.what = what


class ClusterRefused(TideError):
    """The API answered with an error."""

    def __init__(self, what: str, status: int, detail: str):
        mend = {401: "log in again", 403: "give the service account that right"}.get(status, "see its text")
        super().__init__(f"{what}: the Kubernetes API answered {status}: {detail}; {mend}")
        self.what, self.status = what, status


def configuration(cluster: Cluster) -> Any:
    """``kubernetes.client.Configuration``: of the kubeconfig, else of the pod's service account; its clients
    try again what a busy API server refuses. Raises :class:`NoClusterAccess`.
    """
    from kubernetes import client, config
    from urllib3 import Retry

    made: Any = client.Configuration()
    try:
        if cluster.kubeconfig is None:
            config.load_incluster_config(client_configuration=made)
        else:
            path = str(cluster.kubeconfig.expanduser())
            config.load_kube_config(path, context=cluster.context, client_configuration=made)
    except (config.ConfigException, OSError) as error:
        raise NoClusterAccess(cluster, str(error)) from error
    # POST too: names are our own, a second one is answered 409
    made.retries = Retry(
        RETRIES, status_forcelist=BUSY, allowed_methods=None, backoff_factor=BACKOFF_S, raise_on_status=False
    )
    return made


def api_client(cluster: Cluster) -> "ApiClient":
    """A client of the API. Raises :class:`NoClusterAccess`."""
    from kubernetes import client

    return client.ApiClient(configuration(cluster))


def core_api(client: "ApiClient") -> Any:
    """``CoreV1Api``, whose methods carry no types worth the name."""
    from kubernetes.client import CoreV1Api

    return CoreV1Api(client)


@contextmanager
def asking(what: str) -> Iterator[None]:
    """The client's errors as the platform's. Raises :class:`ClusterUnreachable`, :class:`ClusterRefused`."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if not error.status:
            raise ClusterUnreachable(what, str(error.reason)) from error
        raise ClusterRefused(what, error.status, refusal(error)) from error
    except HTTPError as error:
        raise ClusterUnreachable(what, str(error)) from error


def refusal(error: Any) -> str:
    """The sentence in the API's answer; ``error``: a ``kubernetes.client.ApiException``."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
