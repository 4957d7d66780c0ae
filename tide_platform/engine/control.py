"""The scheduler's end of the plugin's routes: one operation in, one JSON-able reply out, of its own rank."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import TideError
from tide_platform.config.engine import EngineConfig
from tide_platform.engine.reload import ReloadFailed, ServedDraft, reload_draft
from tide_platform.engine.rows import RowHooks


class Control:
    """State of the plugin in one scheduler process."""

    def __init__(
        self,
        config: EngineConfig,
        adapter: str,
        verify_rule: str,
        served: ServedDraft | None,
        rows: RowHooks,
        missing_hooks: Callable[[], list[str]],
        dp_rank: int = 0,
    ):
        self.config, self.adapter, self.verify_rule = config, adapter, verify_rule
        self.served, self.rows, self.missing_hooks = served, rows, missing_hooks
        self.dp_rank = dp_rank
        self.draft_digest = config.draft_digest
        self.weights_checksum = served.draft_checksum() if served else None
        self.reloads = 0
        self.capture_error: str | None = None
        self._former: _Former | None = None  # while other ranks may yet refuse the draft

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Runs an operation. Raises nothing: an exception on the scheduler's thread would end the server."""
        operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "capture": self._set_capture,
            "reload": self._reload,
            "settle": self._settle,
            "requests": self._requests,
        }
        try:
            reply = operations[message["op"]](message)
        except TideError as error:
            reply = {"error": str(error), "type": type(error).__name__}
        except Exception as error:  # noqa: BLE001 (see the docstring)
            reply = {"error": f"{type(error).__name__}: {error}", "type": "InternalError"}
        return reply | {"dp_rank": self.dp_rank}

    def fail_capture(self, error: Exception) -> None:
        """Capture had a fault: serving goes on without it, and the status says so."""
        self.capture_error = f"{type(error).__name__}: {error}"
        self.rows.give_up("error")

    def _status(self, message: dict[str, Any]) -> dict[str, Any]:
        missing = self.missing_hooks()
        reply: dict[str, Any] = {
            "adapter": self.adapter,
            "verify_rule": self.verify_rule,
            "deployment": self.config.deployment,
            "target_digest": self.config.target_digest,
            "draft_digest": self.draft_digest,
            "weights_checksum": self.weights_checksum,
            "reloads": self.reloads,
            "scheduler_pid": os.getpid(),
            "missing_hooks": missing,
            "capture": self._capture_status(missing),
        }
        if message.get("checksums") and self.served:
            reply["weights_checksum"] = self.served.draft_checksum()
            reply["target_checksum"] = self.served.target_checksum()
        return reply

    def _capture_status(self, missing: list[str]) -> dict[str, Any]:
        capture = self.rows.capture
        if capture is None:
            empty: dict[str, Any] = {"samples": 0, "rows": 0, "open": 0, "dropped": {}, "skipped": {}}
            return {"live": False, "enabled": False, "error": None} | empty
        live = not missing and self.capture_error is None
        state = {"live": live, "error": self.capture_error, "cost": self.rows.cost.status()}
        return state | capture.status()

    def _requests(self, message: dict[str, Any]) -> dict[str, Any]:
        live = self.rows.live
        if live is None:
            return {
                "error": "this server counts no requests (no draft, or counting failed: see its log)",
                "type": "NotCounted",
            }
        read = message["after"]  # by rank; nothing yet of a server that was never asked
        return live.since(read[self.dp_rank] if read else 0)

    def _set_capture(self, message: dict[str, Any]) -> dict[str, Any]:
        capture = self.rows.capture
        if capture is None:
            return {
                "error": "this server captures nothing (no draft, or capture.enabled is false)",
                "type": "NoCapture",
            }
        if message.get("enabled") and self.capture_error:
            return {
                "error": f"capture failed: {self.capture_error}; restart the server",
                "type": "CaptureFailed",
            }
        capture.policy.change(message)
        return self._status({})["capture"]

    def _reload(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.served is None:
            raise ReloadFailed("this server has no draft")
        done = reload_draft(self.served, Path(message["folder"]), message["stamp"], message["ignored"])
        self._former = _Former(str(self.draft_digest), self.weights_checksum, done.undo)
        self.draft_digest, self.weights_checksum = message["digest"], done.weights_checksum
        self.reloads += 1
        self.rows.draft_changed(message["digest"])
        return {
            "ok": True,
            "digest": self.draft_digest,
            "weights_checksum": done.weights_checksum,
            "target_checksum_before": done.target_checksum_before,
            "target_checksum_after": done.target_checksum_after,
            "copy_s": done.copy_s,
            "ranks": done.ranks,
        }

    def _settle(self, message: dict[str, Any]) -> dict[str, Any]:
        """All ranks have answered a reload: the draft stays, or the one of before goes back where it was
        replaced.
        """
        former, self._former = self._former, None
        if former is not None and not message["keep"]:
            former.undo()
            self.draft_digest, self.weights_checksum = former.digest, former.weights_checksum
            self.reloads -= 1
            self.rows.draft_changed(former.digest)
        return {"ok": True}


@dataclass(frozen=True)
class _Former:
    """The draft before a reload. ``undo`` holds its weights."""

    digest: str
    weights_checksum: str | None
    undo: Callable[[], None]
