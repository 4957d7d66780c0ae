"""Whether a server may take traffic: it generates, the plugin lives, and its draft is the right one."""

from collections.abc import Collection, Iterator
from typing import Any, Protocol

from tide_platform.config import Settings
from tide_platform.serving.client import ServerRefused, ServerUnreachable


class Asked(Protocol):
    """What is asked of a server (:class:`~tide_platform.serving.client.SglangClient` has it)."""

    def healthy(self) -> bool: ...
    def status(self) -> dict[str, Any]: ...


def not_ready(settings: Settings, server: Asked, drafts: Collection[str]) -> Iterator[str]:
    """Every reason against it. ``drafts``: those that may be served now; empty: any.

    More than one, because a rollout's challenger is right while it is tried.
    """
    if not server.healthy():
        yield "/health does not answer 200"
        return
    try:
        status = server.status()
    except (ServerUnreachable, ServerRefused) as error:
        yield f"the plugin does not answer: {error}"
        return
    if status.get("deployment") != settings.deployment:
        yield f"it serves deployment {status.get('deployment')}, not {settings.deployment}"
    if not settings.serving.k:
        return
    capture = status.get("capture", {})
    if settings.capture.enabled and not capture.get("live"):
        yield f"capture is dead: {capture.get('error') or status.get('missing_hooks')}"
    if drafts and status.get("draft_digest") not in drafts:
        yield f"it serves draft {status.get('draft_digest')}, not {' or '.join(sorted(drafts))}"
