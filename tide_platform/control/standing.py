"""What of a deployment stands as it should not, now: servers that do not answer, capture that is dead, a
rollout that does not move, speculation that costs more than it brings.
"""

from tide_platform.cluster.access import ClusterRefused, ClusterUnreachable, NoClusterAccess
from tide_platform.cluster.discovery import ServersMissing
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.notify import Message
from tide_platform.control.speed import NAME as SPEEDUP
from tide_platform.serving.admin import AdminKeyMissing
from tide_platform.serving.client import ServerRefused, ServerUnreachable
from tide_platform.serving.fleet import Server, glance_at_all, require_all


def standing(settings: Settings, ledger: Ledger, now: float) -> dict[str, Message]:
    """All that stand, each by a name that stays the same while it does. Raises what the ledger raises."""
    found: dict[str, Message] = {}
    deployment = settings.deployment
    try:
        with glance_at_all(settings) as servers:
            for server in servers:
                found |= _of_server(settings, server)
            require_all(settings, len(servers))
    except ServersMissing as error:
        title = f"{deployment}: {error.ready} of {error.wanted} servers are ready"
        found["servers missing"] = Message(title, str(error), "failure")
    except (AdminKeyMissing, NoClusterAccess, ClusterUnreachable, ClusterRefused) as error:
        found["servers"] = Message(f"{deployment}: no server can be asked", str(error), "failure")
    rollout = ledger.rollouts.unfinished(deployment)
    if rollout is not None and now - rollout.updated_at >= settings.notify.patience_s:
        found[f"rollout {rollout.id}"] = Message(
            f"{deployment}: the rollout of draft {rollout.challenger[:12]} is unfinished",
            f"it stands at step {rollout.step} for {now - rollout.updated_at:.0f} s: see `tide status`",
            "failure",
        )
    slow = {size: value for size, value in ledger.controls.get(deployment, SPEEDUP).items() if value < 1}
    if slow:
        speeds = ", ".join(f"{value:.2f} with {size} requests at a time" for size, value in slow.items())
        text = f"times as fast as without: {speeds}; see `tide speculation`"
        found["speed"] = Message(f"{deployment}: speculation slows the server down", text, "warning")
    return found


def _of_server(settings: Settings, server: Server) -> dict[str, Message]:
    url, deployment = server.base_url, settings.deployment
    try:
        capture = server.status()["capture"]
    except (ServerUnreachable, ServerRefused) as error:
        title = f"{deployment}: {url} does not answer"
        return {f"server {url}": Message(title, str(error), "failure")}
    # switched off by hand is not dead: it lives, and is not enabled
    if settings.capture.enabled and not capture.get("live", True):
        why = capture.get("error") or "its hooks are not in place"
        title = f"{deployment}: capture is dead on {url}"
        return {f"capture {url}": Message(title, f"{why}; restart the server", "failure")}
    return {}
