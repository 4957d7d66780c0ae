"""What the platform asks of the Kubernetes API: the chart's Role grants this and no more."""

from typing import NamedTuple


class Right(NamedTuple):
    """One verb on one resource of the namespace."""

    group: str  # empty: the core group
    resource: str
    subresource: str
    verb: str

    def __str__(self) -> str:
        name = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {name}{f'.{self.group}' if self.group else ''}"


def _of(group: str, name: str, *verbs: str) -> list[Right]:
    resource, _, subresource = name.partition("/")
    return [Right(group, resource, subresource, verb) for verb in verbs]


# a run starts trainer pods, or an indexed job with its headless service, follows and ends them; Dagster's run
# launcher does so with the run itself, and asks for the status of its job
TRAINER = (
    *_of("", "pods", "create", "get", "list", "watch", "delete"),
    *_of("", "pods/log", "get"),
    *_of("", "services", "create", "get", "list", "delete"),
    *_of("", "events", "list"),
    *_of("batch", "jobs", "create", "get", "list", "watch", "delete"),
    *_of("batch", "jobs/status", "get"),
)
SERVING = _of("", "pods", "list")  # found by their labels
BY_SERVICE = _of("", "services", "get")  # to tell which pods a service lacks
DOCTOR = _of("", "persistentvolumeclaims", "get")
