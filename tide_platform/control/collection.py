"""When the servers capture: on while the draft may gain from it (TIDE, arXiv 2602.05145, algorithm 1, with
tests in place of its comparisons of two averages).

Off when training stops paying: the gate rejected `collection.patience` challengers in a row. On again when
live acceptance falls. A hand has precedence: a server that somebody switched stays as it is until it does
what the platform wants, or is started anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.records import VerdictRecord

NAME = "collection"  # under which it is kept


@dataclass(frozen=True)
class Collection:
    """What the platform wants. ``at``: Unix time, seconds, of the last change, 0 before the first: nothing is
    asked of the servers until then. ``told``: which life of a server (``started_at``) was told, by its URL.
    """

    on: bool = True
    reason: str = "from the start"
    at: float = 0.0
    told: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> "Collection":
        return cls(**(raw or {}))


def decide(
    settings: Settings,
    wanted: Collection,
    fell: Sequence[str],
    verdicts: Sequence[VerdictRecord],
    now: float,
) -> Collection:
    """``fell``: drifts found now, in words; ``verdicts``: the deployment's newest, oldest first."""
    if settings.collection.mode == "always":
        return wanted if wanted.on else Collection(True, "collection.mode is always", now)
    if fell:
        return wanted if wanted.on else Collection(True, "; ".join(fell), now)
    patience = settings.collection.patience
    last = [verdict for verdict in verdicts[-patience:] if verdict.judged_at > wanted.at]
    if wanted.on and len(last) == patience and not any(verdict.passed for verdict in last):
        return Collection(False, f"{patience} challengers in a row were no better than their champion", now)
    return wanted


def to_tell(wanted: Collection, enabled: Mapping[str, bool], started_at: Mapping[str, float]) -> list[str]:
    """Servers that are to be switched. ``enabled``, ``started_at`` (Unix time, seconds): by URL."""
    return [url for url in enabled if wanted.at and wanted.told.get(url) != started_at[url]]


def held_by_hand(
    wanted: Collection, enabled: Mapping[str, bool], started_at: Mapping[str, float]
) -> list[str]:
    """Servers that do otherwise although they were told, or although nothing was asked of them yet."""
    told = {url: not wanted.at or wanted.told.get(url) == started_at[url] for url in enabled}
    return [url for url, on in enabled.items() if on != wanted.on and told[url]]
