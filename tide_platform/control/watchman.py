"""The served draft, looked after for as long as it is served: a tick reads what the servers finished, finds
out whether acceptance fell, switches capture, and says whether somebody has to mend something. Cheap: what
takes time is done by :mod:`tide_platform.control.mend`, in a run of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from tide_platform.config import Settings
from tide_platform.control import collection as collecting
from tide_platform.control.audit import SENSOR, Action, Entry
from tide_platform.control.collection import Collection
from tide_platform.control.database import LedgerLocked
from tide_platform.control.drift import Drift, drifts, has_recovered
from tide_platform.control.history import observe
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory, remember
from tide_platform.control.reconcile import RunView
from tide_platform.control.rollout import alone
from tide_platform.control.speed import watch_speed
from tide_platform.control.watch import Limits, acceptance_fell
from tide_platform.serving.client import ServerRefused, ServerUnreachable
from tide_platform.serving.deployment_lock import DeploymentBusy
from tide_platform.serving.fleet import Server


@dataclass
class Look:
    """What a tick found. ``broken``: what must be brought in order; ``suspicions``: that the champion is
    worse than the draft before it; ``mended_by``: the run that sees to it, where there is one.
    """

    broken: list[str] = field(default_factory=list)
    suspicions: list[str] = field(default_factory=list)
    drifts: list[Drift] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mended_by: str | None = None

    @property
    def mend(self) -> list[str]:
        """Reasons to start a run that mends; empty where all is well."""
        return self.broken + self.suspicions

    @property
    def message(self) -> str:
        return "; ".join(self.mend + self.notes) or "all is well"


class MendingRuns(Protocol):
    """The orchestrator's runs, as this needs them."""

    def mending(self, deployment: str) -> RunView | None:
        """The newest run that was asked for to mend the deployment."""
        ...


def look_after(
    settings: Settings,
    ledger: Ledger,
    servers: Sequence[Server],
    runs: MendingRuns,
    clock: Callable[[], float] = time.time,
) -> Look:
    """One tick. A server that does not answer is told of, and everything else goes on without it."""
    look = Look()
    statuses, requests = _ask(settings, ledger, servers, look)
    served = {url: status["draft_digest"] for url, status in statuses.items()}
    champion = ledger.champion(settings.deployment)
    _disagreement(settings, ledger, served, champion, look)
    draft = _the_draft(served, champion) if len(served) == len(servers) else None
    if draft is not None:
        target = next(iter(statuses.values()))["target_digest"]
        _remember(settings, ledger, draft, requests, clock(), look)
        look.notes += watch_speed(settings, ledger, target, draft, clock())
    _collect(settings, ledger, servers, statuses, look, clock())
    last = runs.mending(settings.deployment) if look.mend else None
    if last is not None and (not last.finished or clock() - last.since < settings.watch.mend_seconds):
        look.mended_by = last.run_id
        look.notes.append(f"run {last.run_id} mends")
    return look


def _ask(
    settings: Settings, ledger: Ledger, servers: Sequence[Server], look: Look
) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """Each server's status by its URL, and what all of them finished since the last look."""
    statuses: dict[str, dict[str, Any]] = {}
    requests: list[Any] = []
    for server in servers:
        try:
            status = server.status()
            requests += observe(ledger.history, settings.deployment, server)
            statuses[server.base_url] = status
        except (ServerUnreachable, ServerRefused) as error:
            look.notes.append(str(error))
    return statuses, sorted(requests, key=lambda one: one["at"])


def _disagreement(
    settings: Settings, ledger: Ledger, served: dict[str, str], champion: str | None, look: Look
) -> None:
    """A rollout that nobody works on any more, and servers that came back with another draft."""
    unfinished = ledger.rollouts.unfinished(settings.deployment)
    if unfinished is not None:
        broken = [f"the rollout of {unfinished.challenger} was left unfinished ({unfinished.step})"]
    else:
        broken = [
            f"{url} serves {digest}, the champion is {champion}"
            for url, digest in served.items()
            if champion is not None and digest and digest != champion
        ]
    if broken and _free(settings, ledger):  # else somebody is at it
        look.broken += broken


def _the_draft(served: dict[str, str], champion: str | None) -> str | None:
    """The draft that all servers serve as champion: one that is only being tried is none."""
    drafts = set(served.values())
    if len(drafts) != 1 or (champion is not None and champion not in drafts):
        return None
    return drafts.pop() or None


def _free(settings: Settings, ledger: Ledger) -> bool:
    try:
        with alone(settings, ledger, wait_s=0):
            return True
    except (DeploymentBusy, LedgerLocked):
        return False


def _remember(
    settings: Settings, ledger: Ledger, draft: str, requests: list[Any], now: float, look: Look
) -> None:
    """What was seen of the served draft goes into the memory; what that shows, into ``look``."""
    of = settings.watch
    before = Memory.from_json(ledger.controls.get(settings.deployment, MEMORY))
    memory = remember(before, draft, requests, now, of.reference_requests, of.recent_requests)
    for name, drift in list(memory.drifted.items()):
        if has_recovered(memory, drift, of.slice_requests):
            rest = {key: value for key, value in memory.drifted.items() if key != name}
            memory = replace(memory, drifted=rest, recovered=memory.recovered | {name: now})
    look.drifts = drifts(settings, memory)
    for drift in look.drifts:
        memory = replace(memory, drifted=memory.drifted | {drift.slice: asdict(drift)})
        detail = asdict(drift)
        ledger.note(
            Entry(settings.deployment, SENSOR, Action.DRIFTED, str(drift), digest=draft, detail=detail)
        )
    if not memory.suspected:
        memory = replace(memory, suspected=_suspicion(settings, memory))
    if memory != before:
        ledger.controls.put(settings.deployment, MEMORY, memory.to_json())
    look.suspicions += [memory.suspected] if memory.suspected else []
    look.notes += [f"{name} has fallen since promotion" for name in memory.drifted]


def _suspicion(settings: Settings, memory: Memory) -> str:
    """Why the draft may be worse than the one before it; traffic that changed looks the same from here.
    Requests from before the last time that it was cleared are not held against it again.
    """
    if not memory.before:
        return ""
    of = settings.rollout
    limits = Limits(settings.serving.k, of.confidence, of.max_loss, of.max_slowdown, of.max_aborts)
    pairs = {
        "the draft before it": (memory.last_of_before, memory.requests[-settings.watch.recent_requests :])
    }
    if len(memory.first) >= settings.watch.reference_requests:
        pairs["its own first requests"] = (memory.first, memory.newest)
    for name, (yardstick, newest) in pairs.items():
        new = [one for one in newest if one["at"] > memory.cleared]
        if (fell := acceptance_fell(yardstick, new, limits)) is not None:
            return f"{memory.draft} against {name}: {fell}"
    return ""


def _collect(
    settings: Settings,
    ledger: Ledger,
    servers: Sequence[Server],
    statuses: dict[str, dict[str, Any]],
    look: Look,
    now: float,
) -> None:
    """Capture follows what is wanted, on every server that can capture and that no hand has switched."""
    deployment = settings.deployment
    enabled = {url: bool(of["capture"]["enabled"]) for url, of in statuses.items() if of["capture"]["live"]}
    if not settings.capture.enabled or not enabled:
        return
    before = Collection.from_json(ledger.controls.get(deployment, collecting.NAME))
    fell = [str(drift) for drift in look.drifts] + look.suspicions
    verdicts = ledger.last_verdicts(deployment, settings.collection.patience)
    wanted = collecting.decide(settings, before, fell, verdicts, now)
    if wanted.on != before.on:
        action = Action.CAPTURE_ON if wanted.on else Action.CAPTURE_OFF
        ledger.note(Entry(deployment, SENSOR, action, wanted.reason))
    started = {url: ledger.history.cursor(deployment, url).started_at for url in enabled}
    told = dict(wanted.told)
    for server in servers:
        if server.base_url in collecting.to_tell(wanted, enabled, started):
            try:
                server.capture(enabled=wanted.on)
                told[server.base_url] = started[server.base_url]
            except (ServerUnreachable, ServerRefused) as error:
                look.notes.append(str(error))
    look.notes += [
        f"{url}: capture was switched by hand and is left as it is"
        for url in collecting.held_by_hand(wanted, enabled, started)
    ]
    if (wanted := replace(wanted, told=told)) != before:
        ledger.controls.put(deployment, collecting.NAME, wanted.to_json())
