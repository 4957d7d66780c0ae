"""What a soak must show, and ``soak.json``."""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tide_platform.config import Settings
from tide_platform.config.files import write_json
from tide_platform.control.history import Block, total
from tide_platform.control.ledger import Ledger


@dataclass
class Check:
    """One thing that must hold, with every figure that it rests on."""

    name: str
    holds: bool
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Result:
    """``events``: seconds since the start, and what happened."""

    checks: list[Check] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    problem: str = ""  # what ended it early

    @property
    def holds(self) -> bool:
        return not self.problem and bool(self.checks) and all(check.holds for check in self.checks)

    def write(self, path: Path, **more: Any) -> None:
        raw = asdict(self) | {"holds": self.holds, "at": time.time()} | more
        write_json(path, json.loads(json.dumps(raw, default=str)))


def acceptance(blocks: list[Block], draft: str, tenant: str) -> dict[str, Any]:
    """Live figures of a draft on a workload's traffic."""
    own = [block for block in blocks if block.draft == draft and block.tenant == tenant]
    if not own:
        return {"requests": 0, "acceptance_length": None, "token_ms": None}
    all_of = total(own)
    return {
        "requests": all_of.requests,
        "acceptance_length": all_of.acceptance_length,
        "token_ms": all_of.mean_token_ms,
    }


def nothing_lost(settings: Settings, captured: int, dropped: int, foreign: int) -> Check:
    """Every sample that the server handed over is in the dataset, once. ``foreign``: samples that came
    another way.
    """
    from tide_platform.store.hidden_states import open_store

    ids = [ref.sample_id for ref in open_store(settings).refs()]
    figures = {
        "captured": captured,
        "dropped": dropped,
        "in_dataset": len(ids) - foreign,
        "twice": len(ids) - len(set(ids)),
    }
    return Check(
        "nothing lost", captured == len(ids) - foreign == len(set(ids)) - foreign and not dropped, figures
    )


def agreed(settings: Settings, ledger: Ledger, served: list[str | None]) -> Check:
    """Ledger, alias and every server name one draft; no window and no rollout is unfinished."""
    from tide_platform.registry.mlflow_registry import CHAMPION, DraftRegistry

    alias = DraftRegistry(settings).alias(CHAMPION)
    figures = {
        "ledger": ledger.champion(settings.deployment),
        "alias": alias.digest if alias else None,
        "servers": served,
        "open_windows": [str(record.key) for record in ledger.open(settings.deployment)],
        "unfinished": ledger.rollouts.unfinished(settings.deployment) is not None,
    }
    one = {figures["ledger"], figures["alias"], *served}
    return Check(
        "all agree on one draft",
        len(one) == 1 and None not in one and not figures["open_windows"] and not figures["unfinished"],
        figures,
    )
