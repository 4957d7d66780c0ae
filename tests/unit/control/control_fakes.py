"""A dataset in memory, as cutting sees it; servers that count requests as the engine does."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tide_platform.config import draft_digest
from tide_platform.control.ledger import Ledger
from tide_platform.control.rollouts import Order
from tide_platform.control.states import WindowKey
from tide_platform.engine.live import Live
from tide_platform.serving.client import ServerUnreachable


def make_draft(folder: Path, text: str) -> str:
    """A draft by its files alone, staged below ``folder``; its digest."""
    work = folder / text
    work.mkdir(parents=True)
    (work / "config.json").write_text(json.dumps({"draft": text}))
    (work / "model.safetensors").write_text(text)
    digest = draft_digest(work)
    work.rename(folder / digest)
    return digest


@dataclass(frozen=True)
class Row:
    row_id: int
    tenant: str = "default"
    request_id: str = ""
    num_tokens: int = 10
    captured_at: float = 0.0

    @property
    def sample_id(self) -> str:
        return f"s{self.row_id}"


def serve(ledger: Ledger, key: WindowKey, run_id: str, challenger: str = "new", previous: str = "old"):
    """A rollout of the window's challenger, all done."""
    order = Order(challenger, f"run {run_id}", "better", window=key.window, run_id=run_id)
    rollout = ledger.rollouts.begin(key.deployment, order, previous, ["http://server"])
    ledger.rollout_served(rollout, {})


class Data:
    """A growing dataset that counts reads."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.reads = 0

    def after(self, row_id: int) -> list[Row]:
        self.reads += 1
        return [row for row in self.rows if row.row_id > row_id]


class LiveServer:
    """A server's counts, as the engine keeps them, behind the routes' answers."""

    def __init__(self, draft: str = "d1", name: str = "one"):
        self.base_url = f"http://{name}"
        self.now, self.draft, self.most = 1e9, draft, 1024
        self.capturing, self.gone = True, False
        self.start()

    def start(self) -> None:
        """A new life: counts from nothing, captures."""
        self.now += 1
        self.capturing = True
        self.live = Live(self.draft, clock=lambda: self.now, monotonic=lambda: self.now)

    def reload(self, digest: str) -> None:
        self.draft = digest
        self.live.draft_changed(digest)

    def serve(self, requests: int = 1, tenant: str = "ann", rounds: int = 4, accepted: int = 4) -> None:
        reqs: list[Any] = [
            SimpleNamespace(
                origin_input_ids=[0], output_ids=[1], spec_verify_ct=rounds, spec_num_correct_drafts=accepted
            )
            for _ in range(requests)
        ]
        self.live.prefill(reqs)
        self.live.prefilled(reqs)
        for _ in range(rounds):
            self.live.decoded(requests)
        self.now += 1
        for req in reqs:
            self.live.ended(req, tenant, rounds + accepted + 1, "stop")

    def requests(self, after: int = 0) -> dict[str, Any]:
        self._answer()
        return self.live.since(after, self.most)

    def status(self) -> dict[str, Any]:
        self._answer()
        status: dict[str, Any] = {"draft_digest": self.draft, "target_digest": "t"}
        return status | {"capture": {"live": True, "enabled": self.capturing}}

    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]:
        self._answer()
        self.reload(digest)
        return {"ok": True, "pause_s": 0.1, "target_checksum_before": "t", "target_checksum_after": "t"}

    def capture(self, **changes: Any) -> dict[str, Any]:
        self._answer()
        self.capturing = changes["enabled"]
        return {"enabled": self.capturing}

    def _answer(self) -> None:
        if self.gone:
            raise ServerUnreachable(self.base_url, TimeoutError("read"))
