"""The servers of a deployment, asked one by one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from tide_platform.config import Settings, TideError
from tide_platform.serving.client import ServerRefused, ServerUnreachable


class Server(Protocol):
    """What a rollout asks of a server (:class:`~tide_platform.serving.client.SglangClient` has it)."""

    @property
    def base_url(self) -> str: ...
    def status(self) -> dict[str, Any]: ...
    def requests(self, after: int = 0) -> dict[str, Any]: ...
    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]: ...
    def capture(self, **changes: Any) -> dict[str, Any]: ...


class NothingServed(TideError):
    """A server runs without a draft."""

    def __init__(self, url: str):
        super().__init__(
            f"{url} serves no draft, so there is no champion; start `tide serve` with serving.k above 0"
        )
        self.url = url


class ServersDisagree(TideError):
    """The servers do not serve one draft."""

    def __init__(self, served: Mapping[str, str]):
        super().__init__(
            "the servers serve different drafts ("
            + ", ".join(f"{url}: {digest}" for url, digest in served.items())
            + "); `tide promote DIGEST` brings one draft to all of them"
        )
        self.served = dict(served)


class TargetChanged(TideError):
    """The target's checksum moved across a draft reload: outputs can no longer be trusted."""

    def __init__(self, url: str, digest: str, before: str, after: str):
        super().__init__(
            f"{url}: reloading draft {digest} changed the target's weights (checksum {before} -> {after}); "
            "restart the server now and report this"
        )
        self.url, self.before, self.after = url, before, after


def addresses(settings: Settings) -> list[str]:
    """Base URLs of the deployment's servers, the canary first; in a cluster those that are ready now.

    Raises :class:`~tide_platform.cluster.discovery.ServersMissing` where a cluster has none, and what asking
    it raises.
    """
    from tide_platform.serving.launch import base_url

    if settings.cluster is not None and settings.cluster.serving is not None:
        from tide_platform.cluster.discovery import serving_urls

        return serving_urls(settings.cluster)
    return [url.rstrip("/") for url in settings.rollout.servers] or [base_url(settings)]


def require_all(settings: Settings, found: int | None = None) -> None:
    """Before a draft goes to the servers: raises :class:`~tide_platform.cluster.discovery.ServersMissing`
    where the cluster has fewer than ``cluster.serving.expected``, or the caller has ``found`` fewer.
    """
    if settings.cluster is not None and settings.cluster.serving is not None:
        from tide_platform.cluster.discovery import require_servers

        require_servers(settings.cluster, found)


@contextmanager
def connect_all(settings: Settings) -> Iterator[list[Server]]:
    """Clients of all servers, with the deployment's admin key."""
    with _connected(settings) as servers:
        yield servers


@contextmanager
def glance_at_all(settings: Settings) -> Iterator[list[Server]]:
    """The same for whoever comes again soon: each question once, ``watch.answer_seconds`` for its answer, so
    that a server which hangs does not hold up a sensor's tick.
    """
    with _connected(settings, timeout_s=settings.watch.answer_seconds, attempts=1) as servers:
        yield servers


@contextmanager
def _connected(settings: Settings, **patience: Any) -> Iterator[list[Server]]:
    from tide_platform.serving.admin import read_admin_key
    from tide_platform.serving.client import SglangClient

    key = read_admin_key(settings)
    with ExitStack() as stack:
        yield [stack.enter_context(SglangClient(url, key, **patience)) for url in addresses(settings)]


def served_by(
    servers: Sequence[Server], ask: Callable[[Server], dict[str, Any]] | None = None
) -> dict[str, str]:
    """Digest of the draft that each server serves, by its URL. ``ask`` gets a status
    where once is not enough.

    Raises :class:`NothingServed`, :class:`ServerUnreachable`, :class:`ServerRefused`.
    """
    found = {}
    for server in servers:
        digest = (ask or _status)(server)["draft_digest"]
        if not digest:
            raise NothingServed(server.base_url)
        found[server.base_url] = digest
    return found


def the_one(served: Mapping[str, str]) -> str:
    """The digest that all servers serve. Raises :class:`ServersDisagree`."""
    digests = set(served.values())
    if len(digests) > 1:
        raise ServersDisagree(served)
    return digests.pop()


def reload(server: Server, folder: Path, digest: str) -> tuple[dict[str, Any], str | None]:
    """(reply, None) when the server serves ``digest`` now, else (reply, what went wrong).

    Raises :class:`TargetChanged`, and :class:`ServerUnreachable` where it does not even say what it serves.
    """
    reply: dict[str, Any] = {}
    try:
        reply = server.reload_draft(folder, digest)
        problem = None if reply.get("ok", True) else f"it answered {reply}"
    except (ServerRefused, ServerUnreachable) as error:
        problem = str(error)
    found = server.status()["draft_digest"]  # the reply may be lost or wrong: only what it reads back counts
    if found != digest:
        return reply, problem or f"it reads back {found}"
    before, after = reply.get("target_checksum_before"), reply.get("target_checksum_after")
    if before != after:
        raise TargetChanged(server.base_url, digest, str(before), str(after))
    return reply, None


def finished(server: Server, after: int = 0) -> list[Mapping[str, Any]]:
    """All finished requests behind ``after`` that the server still knows."""
    found: list[Mapping[str, Any]] = []
    while True:
        told = server.requests(after)
        found += told["requests"]
        if not told["requests"] or told["requests"][-1]["number"] >= told["last"]:
            return found
        after = told["requests"][-1]["number"]


def _status(server: Server) -> dict[str, Any]:
    return server.status()
