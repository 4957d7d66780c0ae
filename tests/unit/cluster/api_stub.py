"""Objects as the Kubernetes API's client returns them, made from the JSON that the API sends."""

import json
from types import SimpleNamespace
from typing import Any

from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException


def of_kind(kind: str, body: dict[str, Any]) -> Any:
    """``body`` (camelCase, as the API sends it) as a model, such as ``V1Pod``."""
    with ApiClient() as client:
        return client.deserialize(SimpleNamespace(data=json.dumps(body)), kind)


def pod(
    name: str,
    *,
    ready: bool = True,
    address: str | None = "10.0.0.1",
    stateful: bool = False,
    waiting: str = "",
    unschedulable: str = "",
    deleted: bool = False,
) -> Any:
    """A pod of SGLang's."""
    conditions = [{"type": "Ready", "status": str(ready)}]
    if unschedulable:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        conditions.append(condition | {"message": unschedulable})
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    container = {"name": "sglang", "ready": ready, "restartCount": 0, "image": "i", "imageID": "i"}
    metadata: dict[str, Any] = {"name": name, "namespace": "tide"}
    if deleted:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    spec: dict[str, Any] = {"containers": [{"name": "sglang"}]}
    if stateful:
        spec |= {"hostname": name, "subdomain": "tide-sglang"}
    status: dict[str, Any] = {"phase": "Pending" if unschedulable else "Running", "conditions": conditions}
    if not unschedulable:
        status["containerStatuses"] = [container | {"state": state}]
    if address:
        status["podIP"] = address
    return of_kind("V1Pod", {"metadata": metadata, "spec": spec, "status": status})


def refusal(status: int, message: str) -> ApiException:
    error = ApiException(status=status, reason="Forbidden")
    error.body = json.dumps({"message": message})
    return error


class Core:
    """``CoreV1Api`` as far as discovery asks it."""

    def __init__(self, pods: list[Any] | None = None, error: Exception | None = None):
        self.pods, self.error = pods or [], error
        self.selectors: list[str] = []

    def list_namespaced_pod(self, namespace: str, label_selector: str = "", **_: Any) -> Any:
        if self.error:
            raise self.error
        self.selectors.append(label_selector)
        return SimpleNamespace(items=self.pods)

    def read_namespaced_service(self, name: str, namespace: str, **_: Any) -> Any:
        if self.error:
            raise self.error
        body = {"metadata": {"name": name}, "spec": {"selector": {"app": "sglang", "release": "r"}}}
        return of_kind("V1Service", body)
