"""Whether a pod is ready, and why it is not, in the words of the cluster."""

from typing import Any


def why_not_ready(pod: Any) -> str:
    """Empty where the pod is ready. ``pod``: a ``V1Pod``."""
    if pod.metadata.deletion_timestamp is not None:
        return "it is being deleted"
    status = pod.status
    conditions = {each.type: each for each in status.conditions or []}
    ready = conditions.get("Ready")
    if ready is not None and ready.status == "True":
        return ""
    for each in [*(status.init_container_statuses or []), *(status.container_statuses or [])]:
        if (found := _of_container(each)) is not None:
            return found
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return f"{scheduled.reason}: {scheduled.message}"
    if ready is not None and ready.message:
        return ready.message
    return status.message or status.reason or f"phase {status.phase}"


def _of_container(status: Any) -> str | None:
    """What a container waits for, or how it ended; None where neither tells anything."""
    state = status.state
    waiting = state.waiting if state else None
    if waiting is not None and waiting.reason not in (None, "PodInitializing", "ContainerCreating"):
        last = status.last_state.terminated if status.last_state else None
        ended = f"; last ended with {last.reason}, status {last.exit_code}" if last else ""
        return f"{status.name}: {waiting.reason}{f': {waiting.message}' if waiting.message else ''}{ended}"
    ended = state.terminated if state else None
    if ended is not None and ended.exit_code:
        return f"{status.name}: {ended.reason}, status {ended.exit_code}"
    if state and state.running and status.ready is False:
        return f"{status.name}: runs, its probe says not ready"
    return None
