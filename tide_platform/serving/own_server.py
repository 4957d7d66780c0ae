"""A server of its own for a measurement or a check: ``tide serve`` as a user runs it, in a new folder."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config import Settings, TideError
from tide_platform.config.load import NOT_SETTINGS, PREFIX, dump_settings
from tide_platform.serving.admin import ensure_admin_key
from tide_platform.serving.client import SglangClient
from tide_platform.serving.launch import base_url
from tide_platform.serving.preflight import PortBusy, check_port
from tide_platform.serving.processes import end_tree, start_child, tail, tree
from tide_platform.serving.served import served_target

LOG = "serve.log"  # in the folder that the server is served from
STOP_PATIENCE_S = 60.0
# below the kernel's ephemeral range, whose ports an outgoing connection may take before the server binds
_PORTS = range(20000, 29999)


class ServerMissing(TideError):
    """The server did not come up."""

    def __init__(self, log: Path):
        super().__init__(f"the server did not come up; its log: {log}; its end: {tail(log, 3)}")
        self.log = log


@dataclass(frozen=True)
class Served:
    """A running server, as long as the block of :func:`served` lasts."""

    settings: Settings
    url: str
    client: SglangClient
    target: Path


@contextmanager
def served(settings: Settings, folder: Path, port: int | None = None) -> Iterator[Served]:
    """``settings`` served from ``folder``, all else than port and state as they say.

    Raises :class:`ServerMissing`. Nothing is left when the block ends, whatever ends it.
    """
    own = settings.model_copy(deep=True)
    own.state = (folder / "state").absolute()
    own.serving.port = port or _free_port(own.serving.host)
    own.draft = own.draft and own.draft.absolute()
    own.target = own.target and own.target.absolute()
    own.state.mkdir(parents=True, exist_ok=True)
    ready = own.state / "serve.json"
    ready.unlink(missing_ok=True)
    config, log = folder / "tide.yaml", folder / LOG
    config.write_text(dump_settings(own))
    tide = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
    # settings from the environment are in the file already, and would go before what is set here
    others = [name for name in os.environ if name.startswith(PREFIX) and name not in NOT_SETTINGS]
    clean = ["env", *(f"-u{name}" for name in others)]
    argv = [*clean, *tide, "serve", "--config", str(config)]
    process = start_child(argv, log, {}, on_parent_death=signal.SIGTERM)
    members = tree(process.pid)
    try:
        until = time.monotonic() + own.serving.ready_timeout_s + STOP_PATIENCE_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise ServerMissing(log)
            time.sleep(0.2)
        members = tree(process.pid)
        url = base_url(own)
        with SglangClient(url, ensure_admin_key(own)) as client:
            yield Served(own, url, client, served_target(url, own))
    finally:
        end_tree(process, members, STOP_PATIENCE_S)


def _free_port(host: str) -> int:
    """A free port whose sibling (+10000, SGLang's for gRPC) is free as well. Raises :class:`PortBusy`."""
    tries = random.sample(_PORTS, 50)
    for port in tries[:-1]:
        try:
            check_port(host, port)
            check_port(host, port + 10000)
            return port
        except PortBusy:
            continue
    check_port(host, tries[-1])
    return tries[-1]
