"""Fenced deployment of a draft: reload it alone, read the digest back, and only then move the alias (design
4.5).

Every step may die. What is served is the truth: the next run asks the server first, and finishes what it
finds done.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.config.locks import LockHeld, locked
from tide_platform.serving.client import ServerRefused, ServerUnreachable
from tide_platform.serving.drafts import mark_deployed

LOCK_WAIT_S = 60.0


class NotJudged(TideError):
    """No passed verdict on the challenger against the draft that is served now."""

    def __init__(self, challenger: str, served: str):
        super().__init__(
            f"draft {challenger} has no passed verdict against {served}, the draft served now; "
            "it is judged again before it is deployed"
        )
        self.challenger, self.served = challenger, served


class DeploymentBusy(TideError):
    """Another process deploys."""

    def __init__(self, path: Path):
        super().__init__(
            f"{path} was locked for {LOCK_WAIT_S:.0f} s: another process deploys; try again after it"
        )
        self.path = path


class NotServed(TideError):
    """The server did not take the draft; ``served`` is what it serves now."""

    def __init__(self, wanted: str, served: str | None, previous: str, detail: str):
        state = (
            "the previous draft serves again" if served == previous else f"it serves {served}, not {previous}"
        )
        super().__init__(
            f"draft {wanted} was not taken by the server ({detail}); {state}; the alias was not moved"
        )
        self.wanted, self.served, self.previous, self.detail = wanted, served, previous, detail


class TargetChanged(TideError):
    """The target's checksum moved across a draft reload: outputs can no longer be trusted."""

    def __init__(self, digest: str, before: str, after: str):
        super().__init__(
            f"reloading draft {digest} changed the target's weights (checksum {before} -> {after}); "
            "restart the server now and report this"
        )
        self.before, self.after = before, after


class StagedDraftBroken(TideError):
    """The files staged for the server are not the draft that they are named for."""

    def __init__(self, folder: Path, wanted: str, found: str):
        super().__init__(
            f"{folder}: content is {found}, not {wanted}; remove that folder, it is fetched again"
        )
        self.folder, self.wanted, self.found = folder, wanted, found


class Server(Protocol):
    """What deployment asks of the server (:class:`SglangClient` has it)."""

    def status(self) -> dict[str, Any]: ...
    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Deployed:
    """What happened. ``previous`` is None where a dead run had reloaded already and only the alias was
    left.
    """

    served: str
    previous: str | None
    pause_s: float | None  # no token flowed for so long
    weights_checksum: str | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def deploy(
    settings: Settings,
    challenger: str,
    *,
    server: Server,
    passed_against: Callable[[str], bool],
    fetch: Callable[[str], Path],
    promote: Callable[[str], None],
    still_wanted: Callable[[], None],
) -> Deployed:
    """Serve the draft ``challenger`` (a digest) and move the alias to it. May be called again after any
    death.

    ``passed_against(champion)`` reads the verdict; ``fetch(digest)`` stages a draft below ``drafts_folder``;
    ``promote(digest)`` moves the alias; ``still_wanted()`` raises when the caller lost its claim meanwhile.
    Raises :class:`NotJudged`, :class:`DeploymentBusy`, :class:`NotServed`, :class:`TargetChanged`,
    :class:`StagedDraftBroken`.
    """
    start = time.monotonic()
    with deployment_lock(settings):
        still_wanted()
        previous = server.status()["draft_digest"]
        if previous == challenger:
            _record(settings, challenger, promote)
            return Deployed(challenger, None, None, None, time.monotonic() - start)
        if not passed_against(previous):
            raise NotJudged(challenger, previous)
        staged, back = _verified(fetch, challenger), _verified(fetch, previous)
        reply, problem = _reload(server, staged, challenger)
        if problem is not None:
            raise NotServed(challenger, _roll_back(server, back, previous), previous, problem)
        before, after = reply.get("target_checksum_before"), reply.get("target_checksum_after")
        if before != after:
            raise TargetChanged(challenger, str(before), str(after))
        _record(settings, challenger, promote)
    return Deployed(
        served=challenger,
        previous=previous,
        pause_s=reply.get("pause_s"),
        weights_checksum=reply.get("weights_checksum"),
        seconds=time.monotonic() - start,
    )


@contextmanager
def deployment_lock(settings: Settings) -> Iterator[None]:
    """One deployer at a time for this deployment; the lock goes with its process. Raises
    :class:`DeploymentBusy`.
    """
    path = settings.state / f"deploy-{settings.deployment}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, wait_seconds=LOCK_WAIT_S))
        except LockHeld as error:
            raise DeploymentBusy(path) from error
        yield


def _record(settings: Settings, digest: str, promote: Callable[[str], None]) -> None:
    """The served draft becomes the one that a restarted server begins with, and the champion."""
    mark_deployed(settings, digest)
    promote(digest)


def _verified(fetch: Callable[[str], Path], digest: str) -> Path:
    folder = fetch(digest).resolve()
    found = draft_digest(folder)
    if found != digest:
        raise StagedDraftBroken(folder, digest, found)
    return folder


def _reload(server: Server, folder: Path, digest: str) -> tuple[dict[str, Any], str | None]:
    """(reply, None) when the server serves ``digest`` now, else (reply, what went wrong)."""
    reply: dict[str, Any] = {}
    try:
        reply = server.reload_draft(folder, digest)
        problem = None if reply.get("ok", True) else f"it answered {reply}"
    except (ServerRefused, ServerUnreachable) as error:
        problem = str(error)
    found = server.status()["draft_digest"]  # the reply may be lost or wrong: only what it reads back counts
    if found != digest:
        return reply, problem or f"it reads back {found}"
    return reply, None


def _roll_back(server: Server, folder: Path, digest: str) -> str | None:
    """Bring the previous draft back if it is not served; what is served then."""
    found = server.status()["draft_digest"]
    if found == digest:
        return found
    _reload(server, folder, digest)
    return server.status()["draft_digest"]
