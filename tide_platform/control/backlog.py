"""What becomes of windows that land faster than they are trained (``window.policy``). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State

Policy = Literal["latest", "merge", "all"]


@dataclass(frozen=True)
class Fold:
    """``gone`` end as ``state``; ``into`` is trained in their place, with their samples where merged."""

    gone: tuple[WindowRecord, ...]
    into: WindowRecord
    state: State
    reason: str


def folds(
    policy: Policy, waiting: Sequence[WindowRecord], every: Sequence[WindowRecord], max_samples: int
) -> list[Fold]:
    """What to do with owed windows that no run was asked for, oldest first; ``every``: all windows.

    ``latest`` keeps the newest. ``merge`` joins to the newest as many of those right before it as
    ``max_samples`` allow, and lets the newest supersede the others. A window whose attempt failed is not
    merged: what made it fail would fail the newest. ``all`` does nothing.
    """
    if policy == "all" or len(waiting) < 2:
        return []
    *older, newest = waiting
    joined: list[WindowRecord] = []
    if policy == "merge":
        samples, first = newest.samples, newest
        for record in reversed(older):
            samples += record.samples
            if samples > max_samples or record.attempt > 1 or not _adjacent(record, first, every):
                break
            joined.insert(0, record)
            first = record
    rest = tuple(record for record in older if record not in joined)
    if policy == "merge":
        rest = tuple(record for record in rest if record.attempt == 1)
    found = []
    if rest:
        reason = f"{newest.key.window} is newer and waited as well (window.policy: {policy})"
        found.append(Fold(rest, newest, State.SUPERSEDED, reason))
    if joined:
        reason = f"trained as a part of {newest.key.window} (window.policy: merge)"
        found.append(Fold(tuple(joined), newest, State.MERGED, reason))
    return found


def _adjacent(one: WindowRecord, later: WindowRecord, every: Sequence[WindowRecord]) -> bool:
    """Whether no other window's samples lie between the two."""
    return not any(
        one.last_row < other.last_row <= later.after_row for other in every if other.state is not State.MERGED
    )
