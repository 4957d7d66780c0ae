"""Ports that nobody listens on."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Ports whose sibling (+10000) is free as well: SeaweedFS and SGLang take both for gRPC."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            first, second = (stack.enter_context(socket.socket()) for _ in range(2))
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 10000))
            except (OSError, OverflowError):
                continue
            ports.append(port)
        return ports


def free_port() -> int:
    return free_ports(1)[0]
