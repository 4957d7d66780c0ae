"""Ports of the local stack: those that users open are settings, those between services any free ones."""

import random
import socket
from dataclasses import dataclass

from tide_platform.config import Settings
from tide_platform.local.errors import PortTaken, StackError

HOST = "127.0.0.1"
# below the kernel's ephemeral range, whose ports an outgoing connection may take before the service binds
_AUTO_RANGE = range(20000, 29999)

# service -> the setting that holds its port
SETTINGS = {
    "object storage": "stack.s3_port",
    "MLflow": "stack.mlflow_port",
    "Dagster": "stack.dagster_port",
    "SGLang": "serving.port",
    "the exporter": "metrics.port",
}


@dataclass(frozen=True)
class InnerPorts:
    """Ports that only the services themselves use."""

    s3_grpc: int
    filer: int
    filer_grpc: int
    master: int
    master_grpc: int
    volume: int
    volume_grpc: int
    code_server: int


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of the loopback interface now.

    With SO_REUSEADDR, as servers bind: connections in TIME_WAIT of an ended server don't count.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(count: int, taken: set[int]) -> list[int]:
    """``count`` different free ports, none of ``taken``.

    Raises :class:`StackError` when there are not as many.
    """
    found: list[int] = []
    for port in random.sample(_AUTO_RANGE, len(_AUTO_RANGE)):
        if len(found) == count:
            break
        if port not in taken and is_free(port):
            found.append(port)
    if len(found) < count:
        raise StackError(
            f"only {len(found)} of {count} free ports between {_AUTO_RANGE[0]} and {_AUTO_RANGE[-1]}"
        )
    return found


def check_ports(settings: Settings) -> None:
    """Raises :class:`PortTaken` for the first port of ``settings`` that is not free or is used twice."""
    seen: set[int] = set()
    for service, setting in SETTINGS.items():
        port = _get(settings, setting)
        if port in seen or not is_free(port):
            raise PortTaken(service, port, setting)
        seen.add(port)


def with_free_ports(settings: Settings) -> Settings:
    """A copy of ``settings`` in which every port is a free one."""
    copy = settings.model_copy(deep=True)
    for setting, port in zip(SETTINGS.values(), free_ports(len(SETTINGS), set()), strict=True):
        section, name = setting.split(".")
        setattr(getattr(copy, section), name, port)
    return copy


def inner_ports(settings: Settings) -> InnerPorts:
    """Free ports for the services' own use."""
    outer = {_get(settings, setting) for setting in SETTINGS.values()}
    return InnerPorts(*free_ports(len(InnerPorts.__dataclass_fields__), outer))


def _get(settings: Settings, setting: str) -> int:
    section, name = setting.split(".")
    return getattr(getattr(settings, section), name)
