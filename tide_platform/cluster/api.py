"""The few calls of the Kubernetes API that training pods need, on plain dicts."""

from collections.abc import Callable, Mapping
from typing import Any

from tide_platform.cluster.access import BUSY, configuration, refusal
from tide_platform.cluster.faults import ApiUnavailable, ManifestRefused
from tide_platform.config.cluster import Cluster

TIMEOUT_S = (5.0, 30.0)  # to connect, to read
Json = dict[str, Any]


class KubeApi:
    """One namespace. Every method raises :class:`ApiUnavailable` where there is no answer, after retries."""

    def __init__(self, cluster: Cluster):
        from kubernetes import client

        made = configuration(cluster)
        self.host: str = made.host
        self._namespace = cluster.namespace
        self._client: Any = client.ApiClient(made)
        self._core, self._batch = client.CoreV1Api(self._client), client.BatchV1Api(self._client)

    def __enter__(self) -> "KubeApi":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def create(self, manifest: Json) -> None:
        """A pod, job or service. One of the same name that is there already with the same labels is ours: a
        retried request's. Raises :class:`ManifestRefused`.
        """
        kind, meta = manifest["kind"], manifest["metadata"]
        create = {
            "Pod": self._core.create_namespaced_pod,
            "Service": self._core.create_namespaced_service,
            "Job": self._batch.create_namespaced_job,
        }[kind]
        status, why = self._call(lambda: create(self._namespace, manifest, _request_timeout=TIMEOUT_S), True)
        if status is None or (status == 409 and self._has(kind, meta)):
            return
        raise ManifestRefused(what=f"{kind.lower()} {meta['name']}", status=status, message=why)

    def pods(self, labels: Mapping[str, str]) -> list[Json]:
        return self._list(self._core.list_namespaced_pod, labels)

    def jobs(self, labels: Mapping[str, str]) -> list[Json]:
        return self._list(self._batch.list_namespaced_job, labels)

    def services(self, labels: Mapping[str, str]) -> list[Json]:
        return self._list(self._core.list_namespaced_service, labels)

    def events(self, pod: str) -> list[Json]:
        """A pod's, oldest first; they outlive it for an hour."""
        found = self._get(
            lambda: self._core.list_namespaced_event(
                self._namespace, field_selector=f"involvedObject.name={pod}", _request_timeout=TIMEOUT_S
            )
        )
        return sorted(
            found["items"], key=lambda each: each.get("lastTimestamp") or each.get("eventTime") or ""
        )

    def log_tail(self, pod: str, container: str, lines: int = 100) -> str:
        """The last lines; empty where there is no such log (any more). Of the answers that mean "later"
        :class:`ApiUnavailable` is made, as ever.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            # not decoded by the client, which makes "b'...'" of the text
            answer: Any = self._core.read_namespaced_pod_log(
                pod,
                self._namespace,
                container=container,
                tail_lines=lines,
                _request_timeout=TIMEOUT_S,
                _preload_content=False,
            )
            return answer.data.decode(errors="replace")
        except ApiException as error:
            if (silent := no_answer(self.host, error)) is not None:
                raise silent from error
            return ""
        except HTTPError as error:
            raise ApiUnavailable(host=self.host, message=str(error)) from error

    def delete(self, kind: str, name: str) -> None:
        """With all that it owns; one that is gone already is fine."""
        from kubernetes.client import V1DeleteOptions

        delete = {
            "Pod": self._core.delete_namespaced_pod,
            "Service": self._core.delete_namespaced_service,
            "Job": self._batch.delete_namespaced_job,
        }[kind]
        body = V1DeleteOptions(propagation_policy="Background")
        status, why = self._call(
            lambda: delete(name, self._namespace, body=body, _request_timeout=TIMEOUT_S), True
        )
        if status not in (None, 404):
            raise ManifestRefused(what=f"to delete {kind.lower()} {name}", status=status, message=why)

    def _has(self, kind: str, meta: Json) -> bool:
        found = {"Pod": self.pods, "Job": self.jobs, "Service": self.services}[kind](meta["labels"])
        return any(each["metadata"]["name"] == meta["name"] for each in found)

    def _list(self, lister: Callable[..., Any], labels: Mapping[str, str]) -> list[Json]:
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        return self._get(
            lambda: lister(self._namespace, label_selector=selector, _request_timeout=TIMEOUT_S)
        )["items"]

    def _get(self, call: Callable[[], Any]) -> Json:
        answer: list[Any] = []
        self._call(lambda: answer.append(call()))
        return self._client.sanitize_for_serialization(answer[0])

    def _call(self, call: Callable[[], Any], answered: bool = False) -> tuple[int | None, str]:
        """``(None, "")``, or status and message of a refusal where the caller wants them (``answered``)."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            call()
            return None, ""
        except ApiException as error:
            if (silent := no_answer(self.host, error)) is not None:
                raise silent from error
            if answered:
                return error.status, refusal(error)
            raise refused("this request", error) from error
        except HTTPError as error:
            raise ApiUnavailable(host=self.host, message=str(error)) from error


def no_answer(host: str, error: Any, also: tuple[int, ...] = ()) -> ApiUnavailable | None:
    """The fault where ``error``, a ``kubernetes.client.ApiException``, is not the request's: the server is
    away or busy. ``also``: further statuses that leave open what became of the request.
    """
    status = error.status or 0
    if status not in (0, *BUSY, *also):
        return None
    return ApiUnavailable(host=host, message=f"{status} {refusal(error)}")


def refused(what: str, error: Any) -> ManifestRefused:
    return ManifestRefused(what=what, status=error.status, message=refusal(error))
