"""Readiness: one probe a service, and the wait that notices a service which ended."""

import time
from collections.abc import Callable

from tide_platform.config import Settings
from tide_platform.local import services
from tide_platform.local.errors import ServiceFailed, StackError
from tide_platform.local.graphql import Dagster
from tide_platform.local.layout import Layout
from tide_platform.local.ports import HOST, InnerPorts, is_free
from tide_platform.local.supervisor import ENDED, Supervisor

_UNREACHABLE = "DagsterUserCodeUnreachableError"
_PAUSE_S = 0.25
_TAIL_LINES = 12


def server_url(settings: Settings) -> str:
    return f"http://{HOST}:{settings.serving.port}"


def dagster_url(settings: Settings) -> str:
    return f"http://{HOST}:{settings.stack.dagster_port}"


def probes(settings: Settings, inner: InnerPorts) -> dict[str, Callable[[], bool]]:
    """Service name -> whether it is ready now.

    A probe may raise OSError or an HTTP error: not ready either.
    """
    mlflow, server = settings.registry.tracking_uri, server_url(settings)
    return {
        services.STORAGE: lambda: not is_free(settings.stack.s3_port) and _bucket(settings),
        services.MLFLOW: lambda: _answers(f"{mlflow}/health"),
        services.CODE: lambda: not is_free(inner.code_server),
        services.WEBSERVER: lambda: _definitions_loaded(settings),
        services.DAEMON: lambda: Dagster(dagster_url(settings)).daemons_healthy(),
        services.SERVER: lambda: _plugin_live(server, draft=True),
        services.PLAIN: lambda: _plugin_live(server, draft=False),
        services.METRICS: lambda: not is_free(settings.metrics.port),
        services.INGEST: lambda: True,  # it has no interface; the wait has seen that it runs
    }


def wait_ready(
    supervisor: Supervisor,
    layout: Layout,
    probes: dict[str, Callable[[], bool]],
    timeouts_s: dict[str, float],
    say: Callable[[str], None],
) -> dict[str, float]:
    """Wait until every probe says yes; returns the seconds that each took.

    Raises :class:`ServiceFailed` with the log's last lines as soon as a service has ended, and at the
    deadline.
    """
    began = time.monotonic()
    seconds: dict[str, float] = {}
    while len(seconds) < len(probes):
        states = supervisor.states()
        for name, probe in probes.items():
            if states[name].name in ENDED:
                what = f"ended (exit status {states[name].exit_status})"
                raise ServiceFailed(name, what, layout.log(name), tail(layout, name))
            if name in seconds:
                continue
            problem = (
                _problem(probe) if states[name].name == "RUNNING" else " (it ended and is started again)"
            )
            elapsed = time.monotonic() - began
            if problem is None:
                seconds[name] = round(elapsed, 1)
                say(f"{name} is ready after {elapsed:.1f} s")
            elif elapsed > timeouts_s[name]:
                what = f"is not ready after {timeouts_s[name]:.0f} s{problem}"
                raise ServiceFailed(name, what, layout.log(name), tail(layout, name))
        time.sleep(_PAUSE_S)
    return seconds


def _problem(probe: Callable[[], bool]) -> str | None:
    """None when the probe says yes, else why it does not, in words to append (or none)."""
    import httpx

    try:
        return None if probe() else ""
    except (OSError, httpx.HTTPError) as error:
        return f" ({error})"


def tail(layout: Layout, name: str) -> list[str]:
    """The last lines of a service's log."""
    log = layout.log(name)
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-_TAIL_LINES:]


def _bucket(settings: Settings) -> bool:
    """Make the bucket; see that it honours conditional puts (Lance loses commits where it does not)."""
    from botocore.exceptions import BotoCoreError, ClientError

    from tide_platform.store.objects import ObjectStore

    store = ObjectStore(settings.storage)
    try:
        store.ensure_bucket()
    except (BotoCoreError, ClientError) as error:  # the gateway answers before filer and volumes are there
        raise OSError(str(error)) from error
    store.probe_conditional_put()
    return True


def _answers(url: str) -> bool:
    import httpx

    return httpx.get(url, timeout=5).status_code == 200


def _definitions_loaded(settings: Settings) -> bool:
    """Raises ``OSError`` where the code server does not answer the webserver yet, :class:`StackError` where
    the definitions themselves are wrong.
    """
    dagster = Dagster(dagster_url(settings))
    entries = dagster.locations()
    for entry in entries:
        loaded = entry["locationOrLoadError"] or {}
        if loaded.get("__typename") == "PythonError":
            message = loaded["message"].strip()
            if _UNREACHABLE in message:  # a busy machine: the server listens before it answers
                dagster.reload_locations()
                raise OSError(message)
            raise StackError(f"Dagster can't load the definitions: {message}")
    return bool(entries) and all(
        entry["loadStatus"] == "LOADED" and entry["locationOrLoadError"] for entry in entries
    )


def _plugin_live(url: str, *, draft: bool) -> bool:
    """The server is healthy, has the plugin, and serves a draft or, as asked, none."""
    import os

    import httpx

    headers = {"Authorization": f"Bearer {os.environ['TIDE_ADMIN_KEY']}"}
    reply = httpx.get(f"{url}/tide/status", headers=headers, timeout=10)
    if reply.status_code != 200:
        return False
    return (reply.json().get("draft_digest") is not None) is draft and _answers(f"{url}/health")
