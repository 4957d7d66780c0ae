"""The local stack: object storage, MLflow, Dagster, SGLang and ingest, supervised, of one state folder."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from tide_platform.config import Settings, dump_settings
from tide_platform.config.locks import LockHeld, locked
from tide_platform.local import services as names
from tide_platform.local.dagster_home import make_databases
from tide_platform.local.errors import StackBusy, StackError
from tide_platform.local.layout import Layout
from tide_platform.local.leftovers import end_leftovers
from tide_platform.local.ports import InnerPorts, check_ports, inner_ports, with_free_ports
from tide_platform.local.ready import dagster_url, probes, server_url, wait_ready
from tide_platform.local.secrets import load_secrets, write_identities, write_private
from tide_platform.local.services import (
    environment,
    own_environment,
    services,
    stack_settings,
    workspace_yaml,
)
from tide_platform.local.supervisor import State, Supervisor

DAGSTER_TEMPLATE = Path(__file__).parents[2] / "deployments" / "local" / "dagster.yaml"


class Stack:
    """One stack. ``with Stack(...) as stack``: what was started is ended at the end, unless :meth:`keep`."""

    def __init__(self, settings: Settings, say: Callable[[str], None] = print, *, auto_ports: bool = False):
        """``auto_ports``: take free ports in place of those of the settings."""
        self.layout = Layout(settings.state.absolute())
        self._given, self._auto_ports, self.say = settings, auto_ports, say
        self.supervisor = Supervisor(self.layout)
        self._lock: contextlib.ExitStack | None = None
        self._kept = False
        self.settings: Settings
        self.inner: InnerPorts
        self._environ: dict[str, str]

    def __enter__(self) -> "Stack":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self.down()

    def open(self, *, die_with_parent: bool, fresh: bool = False) -> None:
        """End what an earlier stack of this state left, check ports, write configuration, start supervisord.

        ``fresh``: forget what it had, too. For states that nobody else uses: ledger and samples are removed.
        Raises :class:`~tide_platform.local.errors.StackError` of several kinds; then nothing was started.
        """
        self.layout.make()
        self._take_lock()
        end_stale(self.layout, self.say)
        if fresh:
            self.layout.forget()
            self.layout.make()
        chosen = with_free_ports(self._given) if self._auto_ports else self._given
        check_ports(chosen)
        self.settings, self.inner = stack_settings(chosen), inner_ports(chosen)
        keys = load_secrets(self.layout)
        self._write_files(keys)
        own_environment(self.layout, keys)
        self._environ = environment(self.layout, keys, os.environ)
        self.supervisor.start(
            services(self.settings, self.layout, self.inner), self._environ, die_with_parent=die_with_parent
        )

    def start(self, wanted: Iterable[str]) -> dict[str, float]:
        """Start the services ``wanted`` and wait until all are ready; returns seconds until ready by name.

        Object storage goes first, since the others use it from their first second on. Dagster's daemon goes
        last: a run that it starts may deploy at once, so the server must be there. The rest start together.
        Raises :class:`~tide_platform.local.errors.ServiceFailed`.
        """
        wanted = list(wanted)
        if {names.CODE, names.WEBSERVER, names.DAEMON} & set(wanted):
            make_databases(self.layout.dagster_home, self._environ)
        waves = {names.STORAGE: 0, names.DAEMON: 2}
        seconds: dict[str, float] = {}
        for wave in range(3):
            seconds |= self._launch([name for name in wanted if waves.get(name, 1) == wave])
        return seconds

    def write_settings(self) -> None:
        """Write ``self.settings`` for the services that are started from now on."""
        write_private(self.layout.config, dump_settings(self.settings))

    def stop(self, name: str) -> None:
        """Stop one service."""
        self.supervisor.halt(name)

    def keep(self) -> None:
        """Leave the stack up when this process ends."""
        self._kept = True

    def down(self) -> None:
        """End every process of the stack; nothing where another process drives it."""
        if self._lock is None:
            return
        try:
            if self.supervisor.alive():
                self.supervisor.shutdown(last=names.STORAGE)
        finally:
            end_leftovers(self.layout.state)
            self._lock.close()
            self._lock = None

    def addresses(self) -> dict[str, str]:
        return addresses(self.settings)

    def _launch(self, wanted: list[str]) -> dict[str, float]:
        settings = self.settings
        for name in wanted:
            self.supervisor.launch(name)
        every = probes(settings, self.inner)
        servers = (names.SERVER, names.PLAIN)
        limits = {
            name: settings.serving.ready_timeout_s if name in servers else settings.stack.ready_timeout_s
            for name in wanted
        }
        return wait_ready(
            self.supervisor, self.layout, {name: every[name] for name in wanted}, limits, self.say
        )

    def _write_files(self, keys: dict[str, str]) -> None:
        write_identities(self.layout, keys)
        self.write_settings()
        write_private(self.layout.workspace, workspace_yaml(self.inner))
        if not DAGSTER_TEMPLATE.is_file():
            raise StackError(f"{DAGSTER_TEMPLATE} is missing: run the stack from a checkout of the project")
        shutil.copyfile(DAGSTER_TEMPLATE, self.layout.dagster_home / "dagster.yaml")
        write_private(self.layout.stack / "ports.json", json.dumps(asdict(self.inner)))

    def _take_lock(self) -> None:
        """One process at a time drives the stack of a state; the kernel frees the lock when it ends."""
        lock = contextlib.ExitStack()
        try:
            lock.enter_context(locked(self.layout.lock))
        except LockHeld as error:
            raise StackBusy(self.layout.state, str(error.pid or "unknown")) from error
        self._lock = lock


def end_stale(layout: Layout, say: Callable[[str], None]) -> None:
    """End a stack that runs already: one kept up, or one whose owner was killed."""
    supervisor = Supervisor(layout)
    if supervisor.alive():
        say(f"ending the stack that is up (process {supervisor.pid()})")
        supervisor.shutdown(last=names.STORAGE)
    ended = end_leftovers(layout.state)
    if ended:
        say(f"ended {len(ended)} processes that an earlier stack had left")


def stack_states(layout: Layout) -> dict[str, State]:
    """State of each service of the stack that is up; empty when none is."""
    supervisor = Supervisor(layout)
    return supervisor.states() if supervisor.alive() else {}


def addresses(settings: Settings) -> dict[str, str]:
    """What users open, by service."""
    return {
        "SGLang": server_url(settings),
        "Dagster": dagster_url(settings),
        "MLflow": settings.registry.tracking_uri,
        "object storage": settings.storage.endpoint or settings.storage.uri,
        "metrics": f"http://{settings.metrics.host}:{settings.metrics.port}/metrics",
    }
