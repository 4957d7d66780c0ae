"""``tide serve``: starts the server and its spool, proves that capture is live, ends all of it in order."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tide_platform.config import Settings, TideError
from tide_platform.config.locks import LockHeld, locked
from tide_platform.evaluation.speculation import Acceptance
from tide_platform.serving.adaptive import Known, plan_adaptive
from tide_platform.serving.admin import VARIABLE as ADMIN_KEY_VARIABLE
from tide_platform.serving.admin import ensure_admin_key
from tide_platform.serving.client import ServerRefused, ServerUnreachable, SglangClient
from tide_platform.serving.fleet import reload
from tide_platform.serving.launch import LaunchPlan, plan_launch
from tide_platform.serving.preflight import Checked, preflight
from tide_platform.serving.processes import end_tree, start_child, tail, tree
from tide_platform.serving.spool_process import Spool

SERVER_PATIENCE_S = 25.0  # SGLang looks for SIGTERM every 5 s, then lets running requests end
PROGRESS_S = 10.0
POLL_S = 0.5


class ServerDied(TideError):
    """The SGLang process ended by itself."""

    def __init__(self, status: int, log: Path):
        super().__init__(f"the SGLang server ended by itself (status {status}); its log: {log}")
        self.status, self.log = status, log


class ServerNotReady(TideError):
    """It did not become healthy in time."""

    def __init__(self, seconds: float, log: Path):
        super().__init__(
            f"the SGLang server was not healthy after {seconds:.0f} s (serving.ready_timeout_s); log: {log}"
        )
        self.log = log


class PluginNotLive(TideError):
    """SGLang runs without the platform's plugin, or with another deployment's."""

    def __init__(self, problem: str, log: Path):
        super().__init__(f"the tide plugin is not live in SGLang: {problem}; its log: {log}")
        self.problem, self.log = problem, log


class AlreadyServing(TideError):
    """Another ``tide serve`` holds the state folder."""


class ChampionNotTaken(TideError):
    """The champion changed while the server loaded, and it does not take the new one."""

    def __init__(self, digest: str, problem: str):
        super().__init__(f"draft {digest} became champion while the server loaded: {problem}; start it again")
        self.digest, self.problem = digest, problem


def not_asked(_digest: str) -> Acceptance:
    """Of who knows no ledger."""
    return Acceptance([], "the draft's acceptance was not looked up")


def nobody_knows() -> Path | None:
    """The champion, where only this volume can tell."""
    return None


def serve(
    settings: Settings,
    say: Callable[[str], None],
    draft: Path | None = None,
    known: Known = not_asked,
    champion: Callable[[], Path | None] = nobody_knows,
) -> int:
    """Run until SIGTERM or SIGINT; returns exit status 0. Raises a :class:`TideError` for what goes wrong.

    ``draft``: start with this folder, whatever was deployed since. ``known``: a draft's acceptance, which
    ``serving.adaptive`` takes its steps from. ``champion``: the staged folder, named by its digest, of the
    deployment's champion, or None; asked before the start, and again when the server is up.

    Whatever ends it, a ``kill -9`` included, no process that it started is left (see ``child.py``).
    """
    settings.state.mkdir(parents=True, exist_ok=True)
    with _state_lock(settings), _stop_signals() as stop:
        checked = preflight(settings, draft or champion())
        plan = _plan(settings, checked, say, known)
        later = nobody_knows if draft else champion
        return Deployment(settings, checked, plan, stop, say, later).run()


def show_plan(
    settings: Settings, draft: Path | None, say: Callable[[str], None], known: Known = not_asked
) -> None:
    """What :func:`serve` would start, after all of its checks.

    The plugin's configuration and that of adaptive speculation are written, so that the printed command runs
    as it stands.
    """
    checked = preflight(settings, draft)
    plan = _plan(settings, checked, say, known)
    write_engine_config(plan)
    for name, value in sorted(plan.env.items()):
        say(f"{name}={value}")
    say(shlex.join(plan.argv))
    if plan.spool_argv:
        say(shlex.join([sys.executable, *plan.spool_argv]))


def _plan(settings: Settings, checked: Checked, say: Callable[[str], None], known: Known) -> LaunchPlan:
    adaptive = None
    if settings.serving.adaptive and checked.draft is not None:
        adaptive = plan_adaptive(settings, checked.target.digest, checked.draft.digest, known)
        say(f"adaptive speculation: {adaptive.reason}")
    return plan_launch(settings, checked.target, checked.draft, checked.interpreter, adaptive)


def write_engine_config(plan: LaunchPlan) -> None:
    """The file that TIDE_ENGINE_CONFIG (or ``--spec-capture-config``) names."""
    plan.engine_config_path.parent.mkdir(parents=True, exist_ok=True)
    plan.engine_config_path.write_text(plan.engine.model_dump_json(indent=2) + "\n")


class Deployment:
    """One running server with its spool."""

    def __init__(
        self,
        settings: Settings,
        checked: Checked,
        plan: LaunchPlan,
        stop: threading.Event,
        say: Callable[[str], None],
        champion: Callable[[], Path | None] = nobody_knows,
    ):
        self.settings, self.checked, self.plan, self.stop, self.say = settings, checked, plan, stop, say
        self.champion = champion
        self.draft_digest = checked.draft.digest if checked.draft else None
        self.admin_key = ensure_admin_key(settings)
        self.log = settings.state / "logs" / "sglang.log"
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.server: subprocess.Popen[bytes] | None = None
        self.members: list[psutil.Process] = []
        self.spool = Spool(settings, plan, say) if plan.spool_argv else None

    def run(self) -> int:
        try:
            self._start()
            with SglangClient(self.plan.base_url, self.admin_key) as client:
                if self._wait_healthy(client):
                    self._check_plugin(client)
                    self._warm_up(client)
                    self._catch_up(client)
                    self._announce()
                    self._watch()
        except (ServerDied, ServerNotReady, PluginNotLive):
            print(tail(self.log, start=self.log_start), file=sys.stderr)
            raise
        finally:
            self._end()
        self.say("stopped")
        return 0

    def _start(self) -> None:
        plan, checked = self.plan, self.checked
        write_engine_config(plan)
        draft = "no draft"
        if checked.draft:
            k = "adaptive k" if self.settings.serving.adaptive else f"k {self.settings.serving.k}"
            draft = f"draft {checked.draft.digest}, {k}"
        self.say(
            f"starting sglang {checked.interpreter.sglang} on {self.settings.serving.device}: "
            f"target {checked.target.folder.name} ({checked.target.digest}), {draft}; log {self.log}"
        )
        self.say(shlex.join(plan.argv))
        if self.spool:
            self.spool.start()
        environment = plan.env | {ADMIN_KEY_VARIABLE: self.admin_key}
        self.server = start_child(plan.argv, self.log, environment, on_parent_death=signal.SIGKILL)

    def _wait_healthy(self, client: SglangClient) -> bool:
        """False where a signal came first."""
        start = said = time.monotonic()
        while not self.stop.is_set():
            self._check_alive()
            if client.healthy():
                self.say(f"healthy after {time.monotonic() - start:.0f} s")
                return True
            now = time.monotonic()
            if now - start > self.settings.serving.ready_timeout_s:
                raise ServerNotReady(now - start, self.log)
            if now - said >= PROGRESS_S:
                said = now
                self.say(f"loading, {now - start:.0f} s")
            self.stop.wait(POLL_S)
        return False

    def _check_plugin(self, client: SglangClient) -> None:
        try:
            status = client.status()
        except (ServerRefused, ServerUnreachable) as error:
            raise PluginNotLive(str(error), self.log) from error
        problem = plugin_problem(self.plan, status)
        if problem:
            raise PluginNotLive(problem, self.log)
        self.say(f"plugin live: adapter {status.get('adapter')}, verify rule {status.get('verify_rule')}")

    def _warm_up(self, client: SglangClient) -> None:
        """One small request, uncaptured: a server that cannot generate is found now, not by a user."""
        try:
            client.generate(range(1, 9), max_new_tokens=8, capture=False, rid=f"tide-warm-up-{os.getpid()}")
        except (ServerRefused, ServerUnreachable) as error:
            self._check_alive()
            raise PluginNotLive(f"the first request failed: {error}", self.log) from error

    def _catch_up(self, client: SglangClient) -> None:
        """Loading took minutes: a draft that was deployed meanwhile is taken before anyone is served."""
        folder = self.champion() if self.draft_digest else None
        if folder is None or folder.name == self.draft_digest:
            return
        _, problem = reload(client, folder.resolve(), folder.name)
        if problem is not None:
            raise ChampionNotTaken(folder.name, problem)
        self.say(
            f"draft {folder.name} became champion meanwhile: it is served in place of {self.draft_digest}"
        )
        self.draft_digest = folder.name

    def _announce(self) -> None:
        assert self.server is not None
        state = {
            "url": self.plan.base_url,
            "pid": os.getpid(),
            "server_pid": self.server.pid,
            "target_digest": self.checked.target.digest,
            "draft_digest": self.draft_digest,
            "started_at": time.time(),
        }
        (self.settings.state / "serve.json").write_text(json.dumps(state, indent=2) + "\n")
        self.say(f"ready at {self.plan.base_url} (OpenAI API at {self.plan.base_url}/v1)")

    def _watch(self) -> None:
        while not self.stop.wait(POLL_S):
            self._check_alive()
            if self.spool:
                self.spool.keep_alive()

    def _check_alive(self) -> None:
        assert self.server is not None
        status = self.server.poll()
        if status is not None:
            raise ServerDied(status, self.log)
        self.members = tree(self.server.pid) or self.members

    def _end(self) -> None:
        """The server first, so that the spool can drain what it wrote last."""
        if self.server is not None:
            self.say("stopping the server")
            end_tree(self.server, self.members, SERVER_PATIENCE_S)
        if self.spool:
            self.spool.end()
        (self.settings.state / "serve.json").unlink(missing_ok=True)


def plugin_problem(plan: LaunchPlan, status: Any) -> str | None:
    """What differs between the plan and what the plugin says of itself; None where all is as planned."""
    if not isinstance(status, dict) or not status.get("adapter"):
        return f"/tide/status answered {status!r}"
    engine = plan.engine
    wanted = {
        "deployment": engine.deployment,
        "target_digest": engine.target_digest,
        "draft_digest": engine.draft_digest,
    }
    for key, value in wanted.items():
        if status.get(key) != value:
            return f"{key} is {status.get(key)}, started with {value}"
    if engine.capture_enabled and not status.get("capture", {}).get("live"):
        return "its capture hooks are not in place"
    return None


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set on SIGTERM, SIGINT or SIGHUP while the block runs."""
    stop = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    former = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _state_lock(settings: Settings) -> Iterator[None]:
    """One server a state folder: two would share the ring and the spool. Raises :class:`AlreadyServing`."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(settings.state / "serve.lock"))
        except LockHeld as error:
            raise AlreadyServing(
                f"another `tide serve` (pid {error.pid or 'unknown'}) runs with {settings.state}; "
                "stop it, or set `state` to another folder"
            ) from error
        yield
