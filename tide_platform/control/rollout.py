"""A draft's way to all servers of a deployment, under a fence (design 4.5).

One server takes the draft first and is watched on live traffic; then the others, in waves; only when all of
them read it back do the restart pointer, the alias and the ledger follow. Each step is in the ledger before
it is done, so whoever comes after a death knows what was going on: :func:`settle` finishes a rollout whose
draft all servers serve, and undoes any other.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.control.audit import Action
from tide_platform.control.ledger import Ledger
from tide_platform.control.rollouts import Order, Rollout, Step
from tide_platform.control.watch import Finding, Limits, compare_live, whole
from tide_platform.serving.deployment_lock import LOCK_WAIT_S, deployment_lock
from tide_platform.serving.drafts import mark_deployed
from tide_platform.serving.fleet import Server, finished, reload, served_by, the_one

POLL_S = 1.0


class NotJudged(TideError):
    """No passed verdict on the challenger against the draft that is served now."""

    def __init__(self, challenger: str, served: str):
        super().__init__(
            f"draft {challenger} has no passed verdict against {served}, the draft served now; "
            "it is judged again before it is deployed"
        )
        self.challenger, self.served = challenger, served


class NotServed(TideError):
    """A server did not take the draft, or fared worse with it; the previous one is served again."""

    def __init__(self, challenger: str, previous: str, detail: str):
        super().__init__(
            f"draft {challenger} is not served ({detail}); {previous} is served again and the alias was not "
            "moved"
        )
        self.challenger, self.previous, self.detail = challenger, previous, detail


class WorseLive(NotServed):
    """Live traffic showed that the draft is worse. It is barred."""


class StagedDraftBroken(TideError):
    """The files staged for the server are not the draft that they are named for."""

    def __init__(self, folder: Path, wanted: str, found: str):
        super().__init__(
            f"{folder}: content is {found}, not {wanted}; remove that folder, it is fetched again"
        )
        self.folder, self.wanted, self.found = folder, wanted, found


@dataclass(frozen=True)
class Deployed:
    """What happened. ``previous`` is None where the draft was served already and only the rest was left."""

    served: str
    previous: str | None
    pause_s: float | None  # the longest time in which no token flowed on a server
    weights_checksum: str | None
    seconds: float
    servers: list[str] = field(default_factory=list)
    watched: dict[str, Any] | None = None  # what the canary's live requests showed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Means:
    """What a rollout works with. ``fetch(digest)`` stages a draft below ``drafts_folder``;
    ``promote(digest)`` moves the alias; ``told(rollout, served, evidence)`` hears how a rollout ended, before
    the ledger says so: once or more often. It is for people, and must raise nothing. ``complete()`` raises
    where servers are missing, which a new draft would pass by; the way back does not wait for them.
    """

    settings: Settings
    ledger: Ledger
    servers: Sequence[Server]  # the canary first
    fetch: Callable[[str], Path]
    promote: Callable[[str], None]
    told: Callable[[Rollout, bool, Mapping[str, Any]], None] = lambda *_: None
    complete: Callable[[], None] = lambda: None
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic


def roll_out(
    means: Means,
    order: Order,
    *,
    fence: Callable[[str], None],
    watched: bool = True,
) -> Deployed:
    """Serve ``order.challenger`` on all servers. May be called again after any death.

    ``fence(champion)`` raises where the draft must not take the place of the one that is served now; it is
    asked under the lock. Raises what it raises, :class:`NotServed`, :class:`WorseLive`,
    :class:`DeploymentBusy`, :class:`ServersDisagree`, :class:`TargetChanged`, :class:`StagedDraftBroken`,
    :class:`~tide_platform.cluster.discovery.ServersMissing`.
    """
    start, challenger = means.monotonic(), order.challenger
    with alone(means.settings, means.ledger):
        settled = settle_locked(means)
        previous = the_one(served_by(means.servers))
        if previous == challenger and settled is not None and settled.challenger == challenger:
            return Deployed(challenger, None, None, None, means.monotonic() - start, settled.servers)
        fence(previous)
        if order.action is not Action.ROLLED_BACK:
            means.complete()
        urls = [server.base_url for server in means.servers]
        if previous == challenger:  # nobody knows how: only the rest is left
            rollout = means.ledger.rollouts.begin(means.settings.deployment, order, previous, urls)
            rollout = means.ledger.rollouts.reached(rollout, Step.PROMOTING)
            deployed = Deployed(challenger, None, None, None, means.monotonic() - start, urls)
            _finish(means, rollout, deployed.to_json())
            return deployed
        folders = {digest: verified(means.fetch, digest) for digest in (challenger, previous)}
        rollout = means.ledger.rollouts.begin(means.settings.deployment, order, previous, urls)
        return _forward(means, rollout, folders, watched, start)


def settle(means: Means) -> Rollout | None:
    """Finishes or undoes what a dead process left; the rollout, where there was one. Raises what
    :func:`roll_out` does.
    """
    with alone(means.settings, means.ledger):
        return settle_locked(means)


def settle_locked(means: Means) -> Rollout | None:
    """The same, under the deployment's lock."""
    rollout = means.ledger.rollouts.unfinished(means.settings.deployment)
    if rollout is None:
        return None
    served = served_by(means.servers)
    if rollout.step is Step.PROMOTING and set(served.values()) == {rollout.challenger}:
        _finish(means, rollout, {"finished": "by a later process"})
    else:
        _undo(means, rollout, f"its process died ({rollout.step})")
    return rollout


def verified(fetch: Callable[[str], Path], digest: str) -> Path:
    """The draft's folder, whose content is what its name says. Raises :class:`StagedDraftBroken`."""
    folder = fetch(digest).resolve()
    found = draft_digest(folder)
    if found != digest:
        raise StagedDraftBroken(folder, digest, found)
    return folder


def _forward(
    means: Means, rollout: Rollout, folders: Mapping[str, Path], watched: bool, start: float
) -> Deployed:
    canary, *rest = means.servers
    folder = folders[rollout.challenger]
    replies: list[dict[str, Any]] = []

    def take(servers: Sequence[Server]) -> None:
        for server in servers:
            reply, problem = reload(server, folder, rollout.challenger)
            if problem is not None:
                raise NotServed(rollout.challenger, rollout.previous, f"{server.base_url}: {problem}")
            replies.append(reply)

    finding: Finding | None = None
    try:
        before = finished(canary) if watched else []
        take([canary])
        if watched:
            rollout = means.ledger.rollouts.reached(rollout, Step.WATCHED)
            finding = _watch(means, rollout, canary, rest, before)
            if finding.worse:
                raise WorseLive(rollout.challenger, rollout.previous, "; ".join(finding.worse))
        evidence = {"watched": finding.to_json()} if finding else {}
        rollout = means.ledger.rollouts.reached(rollout, Step.WAVES, **evidence)
        size = max(1, math.ceil(means.settings.rollout.wave_share * len(rest)))
        for first in range(0, len(rest), size):
            take(rest[first : first + size])
    except NotServed as error:
        _undo(means, rollout, error.detail, watched=finding.to_json() if finding else None)
        if isinstance(error, WorseLive):
            deployment = means.settings.deployment
            means.ledger.guard.bar(deployment, rollout.challenger, rollout.actor, error.detail)
        raise
    rollout = means.ledger.rollouts.reached(rollout, Step.PROMOTING)
    pauses = [reply["pause_s"] for reply in replies if reply.get("pause_s") is not None]
    deployed = Deployed(
        served=rollout.challenger,
        previous=rollout.previous,
        pause_s=max(pauses, default=None),
        weights_checksum=replies[0].get("weights_checksum"),
        seconds=means.monotonic() - start,
        servers=rollout.servers,
        watched=finding.to_json() if finding else None,
    )
    _finish(means, rollout, deployed.to_json())
    return deployed


def _finish(means: Means, rollout: Rollout, evidence: dict[str, Any]) -> None:
    """Pointer, alias, ledger: in this order, so that the ledger says `served` only when all else does."""
    _record(means, rollout.challenger)
    means.told(rollout, True, evidence)
    means.ledger.rollout_served(rollout, evidence)


def _record(means: Means, digest: str) -> None:
    mark_deployed(means.settings, digest)
    means.promote(digest)


def _undo(means: Means, rollout: Rollout, reason: str, **evidence: Any) -> None:
    """The previous draft on every server, pointer and alias. Raises :class:`NotServed` where a server does
    not take it back: the rollout stays unfinished, and is settled later.
    """
    folder = verified(means.fetch, rollout.previous)
    for server in means.servers:
        if server.status()["draft_digest"] != rollout.previous:
            _, problem = reload(server, folder, rollout.previous)
            if problem is not None:
                detail = f"{reason}; {server.base_url} does not take the previous draft back: {problem}"
                raise TideError(f"rollout of {rollout.challenger}: {detail}; it is tried again")
    _record(means, rollout.previous)
    means.told(rollout, False, {"undone": reason, **evidence})
    means.ledger.rollouts.undone(rollout, reason, **evidence)


def _watch(
    means: Means,
    rollout: Rollout,
    canary: Server,
    controls: Sequence[Server],
    before: list[Mapping[str, Any]],
) -> Finding:
    """Looks at the canary's finished requests until they are enough, or it took too long, or it is worse."""
    of = means.settings.rollout
    limits = Limits(means.settings.serving.k, of.confidence, of.max_loss, of.max_slowdown, of.max_aborts)
    champion = whole(before, rollout.previous)
    seen = max((one["number"] for one in before), default=0)
    marks = {server.base_url: _last(server) for server in controls}
    found: list[Mapping[str, Any]] = []
    aside: list[Mapping[str, Any]] = []
    began = means.monotonic()
    while True:
        means.sleep(POLL_S)
        found += whole(finished(canary, seen), rollout.challenger)
        seen = max([seen, *(one["number"] for one in found)])
        for server in controls:
            new = finished(server, marks[server.base_url])
            marks[server.base_url] = max([marks[server.base_url], *(one["number"] for one in new)])
            aside += whole(new, rollout.previous)
        finding = compare_live(aside or champion, found, limits)
        waited = means.monotonic() - began
        if finding.worse or len(found) >= of.watch_requests or waited >= of.watch_seconds:
            return finding
        if not found and waited >= of.idle_seconds:
            return finding


def _last(server: Server) -> int:
    return server.requests(0)["last"]


@contextlib.contextmanager
def alone(settings: Settings, ledger: Ledger, wait_s: float | None = None) -> Iterator[None]:
    """One deployer at a time, on this machine and on this ledger. ``wait_s``: None waits a minute. Raises
    :class:`DeploymentBusy`, :class:`LedgerLocked`.
    """
    of_ledger = LOCK_WAIT_S if wait_s is None else wait_s
    with deployment_lock(settings, wait_s), ledger.lock(f"rollout:{settings.deployment}", of_ledger):
        yield
