"""supervisord as a child: its configuration, its start, and its RPC interface over a private unix socket."""

import os
import signal
import subprocess
import time
import xmlrpc.client
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.local.errors import StackError
from tide_platform.local.layout import Layout
from tide_platform.local.secrets import write_private
from tide_platform.local.services import Service, tool
from tide_platform.serving import child

_START_S = 60
ENDED = ("EXITED", "FATAL", "STOPPED", "UNKNOWN")


@dataclass(frozen=True)
class State:
    """What supervisord says of a service; ``pid`` is 0 when it is not running, ``name`` its state's."""

    name: str
    pid: int
    exit_status: int
    description: str


def configuration(layout: Layout, services: list[Service]) -> str:
    """supervisord.conf. It holds no keys: those are in the environment that supervisord hands on."""
    head = {
        "unix_http_server": {"file": layout.supervisor_socket, "chmod": "0600"},
        "supervisord": {
            "nodaemon": "true",
            "silent": "true",
            "logfile": layout.log("supervisord"),
            "pidfile": layout.supervisor_pid,
            "childlogdir": layout.logs,
            "directory": layout.state,
            "identifier": "tide",
        }
        | ({"user": "root"} if os.getuid() == 0 else {}),
        "rpcinterface:supervisor": {
            "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
        },
        "supervisorctl": {"serverurl": f"unix://{layout.supervisor_socket}"},
    }
    sections = [_section(name, values) for name, values in head.items()]
    sections += [_program(layout, service, place) for place, service in enumerate(services)]
    return "\n".join(sections)


def _program(layout: Layout, service: Service, place: int) -> str:
    environment = ",".join(f'{name}="{value}"' for name, value in service.env.items())
    values: dict[str, Any] = {
        "command": " ".join(
            _quote(word) for word in [*child.stub(signal.SIGTERM, service.nice), *service.argv]
        ),
        "environment": environment,
        "autostart": "false",
        "autorestart": "unexpected" if service.restart else "false",
        "startsecs": 1,
        "startretries": 3 if service.restart else 0,
        "priority": place + 1,
        "stopsignal": "TERM",
        "stopwaitsecs": service.stop_s,
        "stopasgroup": str(service.stop_group).lower(),
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": layout.log(service.name),
        "stdout_logfile_maxbytes": "20MB",
        "stdout_logfile_backups": 1,
    }
    return _section(f"program:{service.name}", values)


def _section(name: str, values: dict[str, Any]) -> str:
    # supervisord expands %(name)s in values
    lines = [f"{key}={str(value).replace('%', '%%')}" for key, value in values.items() if value != ""]
    return "\n".join([f"[{name}]", *lines, ""])


def _quote(word: str) -> str:
    # supervisord's own shlex: no comments there, but spaces, quotes and backslashes count
    if word and not any(char in word for char in " \t\"'\\;"):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Supervisor:
    """A running supervisord, reached over its socket."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def start(self, services: list[Service], env: dict[str, str], *, die_with_parent: bool) -> None:
        """Write the configuration and start supervisord in a session of its own; no service is started yet.

        ``die_with_parent``: a kill -9 of this process ends the stack too. To be called from the main thread,
        since the kernel watches the thread. Raises :class:`StackError`.
        """
        write_private(self.layout.supervisor_config, configuration(self.layout, services))
        self.layout.supervisor_socket.unlink(missing_ok=True)
        stub = child.stub(signal.SIGTERM) if die_with_parent else []
        log = self.layout.log("supervisord")
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*stub, tool("supervisord", "supervisor"), "-c", str(self.layout.supervisor_config)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches us, and we end the services in order
            )
        deadline = time.monotonic() + _START_S
        while not self.alive():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StackError(
                    f"supervisord did not start (exit status {process.poll()}); its log is {log}"
                )
            time.sleep(0.05)

    def alive(self) -> bool:
        """Whether supervisord answers on the socket."""
        if not self.layout.supervisor_socket.exists():
            return False
        try:
            self._call("getPID")
        except (OSError, xmlrpc.client.Error):
            return False
        return True

    def pid(self) -> int:
        return int(self._call("getPID"))

    def launch(self, name: str) -> None:
        """Start one service without waiting for it. Raises :class:`StackError`."""
        try:
            self._call("startProcess", name, False)
        except xmlrpc.client.Fault as fault:
            if "ALREADY_STARTED" not in fault.faultString:
                raise StackError(f"{name} can't be started: {fault.faultString}") from fault

    def halt(self, name: str) -> None:
        """Stop one service and wait until it has ended."""
        self._stop(name, wait=True)

    def states(self) -> dict[str, State]:
        """State of every service by name."""
        return {
            info["name"]: State(info["statename"], info["pid"], info["exitstatus"], info["description"])
            for info in self._call("getAllProcessInfo")
        }

    def shutdown(self, last: str, tick: Callable[[], None] = lambda: None) -> None:
        """Stop all services at once, ``last`` after the others, then supervisord; returns when all ended."""
        pid = self.pid()
        running = [name for name, state in self.states().items() if state.name not in ENDED]
        for name in running:
            if name != last:
                self._stop(name, wait=False)
        while any(state.name not in ENDED for name, state in self.states().items() if name != last):
            tick()
            time.sleep(0.1)
        self._call("shutdown")
        wait_end(pid)

    def _stop(self, name: str, *, wait: bool) -> None:
        try:
            self._call("stopProcess", name, wait)
        except xmlrpc.client.Fault as fault:
            if "NOT_RUNNING" not in fault.faultString:
                raise StackError(f"{name} can't be stopped: {fault.faultString}") from fault

    def _call(self, method: str, *args: Any) -> Any:
        from supervisor.xmlrpc import SupervisorTransport

        transport = SupervisorTransport(None, None, serverurl=f"unix://{self.layout.supervisor_socket}")
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            return getattr(proxy.supervisor, method)(*args)


def wait_end(pid: int, seconds: float = 30.0) -> bool:
    """Wait until process ``pid`` has ended; reaps it where it is our child."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            if not Path(f"/proc/{pid}").exists() and not _signalable(pid):
                return True
        time.sleep(0.05)
    return False


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
