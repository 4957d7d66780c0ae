"""What is remembered of the served draft's requests: the first ones after its promotion, frozen; the newest;
and the last ones of the draft before it. Bounded, and JSON, so that it outlives every process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tide_platform.capture.split import REFERENCE_TENANT
from tide_platform.control.watch import by_kind, whole
from tide_platform.serving.report import acceptance_length

NAME = "memory"  # under which it is kept

_FIELDS = ("at", "tenant", "rounds", "accepted")

Request = Mapping[str, Any]  # as `/tide/requests` tells of it, no more than `_FIELDS`


@dataclass(frozen=True)
class Memory:
    """``drifted``: by slice, a fall that holds. ``recovered``: by slice, when the last one was over (Unix
    time, seconds). ``suspected``: why the draft may be worse than the one before it; ``cleared``: when that
    was found to be not so.
    """

    draft: str = ""
    since: float = 0.0  # Unix time, seconds: it was first seen
    before: str = ""
    last_of_before: list[Request] = field(default_factory=list)
    first: list[Request] = field(default_factory=list)
    newest: list[Request] = field(default_factory=list)
    drifted: dict[str, dict[str, Any]] = field(default_factory=dict)
    recovered: dict[str, float] = field(default_factory=dict)
    suspected: str = ""
    cleared: float = 0.0

    @property
    def requests(self) -> list[Request]:
        """All that is remembered of the draft, oldest first."""
        return [*self.first, *self.newest]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None) -> "Memory":
        return cls(**(raw or {}))


def remember(
    memory: Memory, draft: str, requests: Iterable[Request], now: float, first: int, newest: int
) -> Memory:
    """``requests``: what ended since the last look. Left out are those that ``draft``, served by all servers,
    did not serve whole, those without a verify round, and the reference set. Another draft than before
    begins anew.
    """
    if memory.draft != draft:
        memory = Memory(draft=draft, since=now, before=memory.draft, last_of_before=memory.requests[-newest:])
    seen = [
        {name: one[name] for name in _FIELDS}
        for one in whole(list(requests), draft)
        if one["tenant"] != REFERENCE_TENANT and one["rounds"]
    ]
    missing = max(0, first - len(memory.first))
    return replace(
        memory,
        first=[*memory.first, *seen[:missing]],
        newest=[*memory.newest, *seen[missing:]][-newest:],
    )


def by_tenant(requests: Iterable[Request]) -> dict[str, list[Request]]:
    """In the order of the requests."""
    return by_kind(requests, lambda one: one["tenant"])


def acceptance(requests: Sequence[Request]) -> float | None:
    """Acceptance length, a ratio of sums; None without a round."""
    rounds, accepted = (sum(one[name] for one in requests) for name in ("rounds", "accepted"))
    return acceptance_length(rounds, accepted)
