"""Tells people what happened: new rows of the audit, in order, and what stands as it should not.

The place up to which the audit was told is kept in the ledger and moves behind each message, so a process
that dies tells its last message twice rather than not at all. Where every address refuses, the place stays,
and the next look goes on from it, until the row is ``notify.give_up_s`` old.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tide_platform.config import Settings, TideError
from tide_platform.control.audit import Action, Entry
from tide_platform.control.ledger import Ledger
from tide_platform.control.notify import COUNTS, Grade, Message, Notifier

CURSOR = "told"  # of the audit, among the ledger's controls
STANDING = "standing"  # conditions that were seen
MOST = 200  # rows a look
log = logging.getLogger("tide.notify")
_GRADES: dict[Action, Grade] = {
    Action.ROLLED_BACK: "failure",
    Action.FAILED: "failure",
    Action.DEPLOYED: "success",
    Action.PROMOTED: "success",
}


class UnknownAction(TideError):
    """``notify.actions`` names no action of the audit."""

    def __init__(self, name: str):
        known = ", ".join(action.value for action in Action)
        super().__init__(f"notify.actions: there is no action {name!r}; the audit knows {known}")
        self.name = name


@dataclass
class Told:
    """Of one look. ``waiting``: rows that wait for an address to take them."""

    messages: list[str] = field(default_factory=list)  # titles
    failed: int = 0  # deliveries
    too_old: int = 0  # rows that were given up
    waiting: bool = False

    @property
    def summary(self) -> str:
        parts = [*self.messages]
        if self.failed:
            parts.append(f"{self.failed} deliveries failed")
        if self.too_old:
            parts.append(f"{self.too_old} older than notify.give_up_s were given up")
        if self.waiting:
            parts.append("no address took the newest; it is tried again")
        return "; ".join(parts) or "nothing new"


def wanted(settings: Settings) -> frozenset[Action]:
    """``notify.actions``. Raises :class:`UnknownAction`."""
    known = {action.value: action for action in Action}
    for name in settings.notify.actions:
        if name not in known:
            raise UnknownAction(name)
    return frozenset(known[name] for name in settings.notify.actions)


def tell_audit(settings: Settings, ledger: Ledger, notifier: Notifier, now: float) -> Told:
    """Tells of the audit's new rows whose action is in ``notify.actions``.

    Raises :class:`UnknownAction`, and what the ledger raises.
    """
    told, actions = Told(), wanted(settings)
    place = ledger.controls.get(settings.deployment, CURSOR).get("row", 0)
    reached = place
    for row, entry in ledger.audit_after(settings.deployment, place, MOST):
        if entry.action in actions:
            message = message_of(entry)
            if now - entry.at > settings.notify.give_up_s:
                told.too_old += 1
                log.error("%s: not told, it is older than notify.give_up_s", message.title)
            elif not _tell(settings, ledger, notifier, message, told):
                told.waiting = True
                break
            ledger.controls.put(settings.deployment, CURSOR, {"row": row})
            place = row
        reached = row
    if reached > place:
        ledger.controls.put(settings.deployment, CURSOR, {"row": reached})
    return told


def tell_standing(
    settings: Settings, ledger: Ledger, notifier: Notifier, now: float, found: Mapping[str, Message]
) -> Told:
    """Tells of each condition in ``found`` once it has stood for ``notify.patience_s``, and when it is over.

    ``found`` holds all that stand now, by a name that stays the same while they do.
    """
    told = Told()
    before = ledger.controls.get(settings.deployment, STANDING)
    after: dict[str, Any] = {}
    for name, message in found.items():
        new = {"since": now, "told": False, "title": message.title}
        state: dict[str, Any] = dict(before.get(name) or new)
        if not state["told"] and now - state["since"] >= settings.notify.patience_s:
            state["told"] = _tell(settings, ledger, notifier, message, told)
            told.waiting |= not state["told"]
        after[name] = state
    for name, state in before.items():
        if name not in found and state["told"]:
            over = Message(f"{state['title']}: over", "It stood until now.", "success")
            _tell(settings, ledger, notifier, over, told)
    if after != before:
        ledger.controls.put(settings.deployment, STANDING, after)
    return told


def tell_one(settings: Settings, ledger: Ledger, notifier: Notifier, message: Message) -> Told:
    """One message, now."""
    told = Told()
    told.waiting = not _tell(settings, ledger, notifier, message, told)
    return told


def message_of(entry: Entry) -> Message:
    about = " of ".join(
        text
        for text in (
            f"draft {entry.digest[:12]}" if entry.digest else "",
            f"window {entry.window}" if entry.window else "",
        )
        if text
    )
    title = f"{entry.deployment}: {f'{about} ' if about else ''}{entry.action}"
    return Message(title, f"{entry.reason} (by {entry.actor})", _GRADES.get(entry.action, "warning"))


def _tell(settings: Settings, ledger: Ledger, notifier: Notifier, message: Message, told: Told) -> bool:
    """Whether it need not be tried again."""
    outcome = notifier.tell(message)
    told.failed += len(outcome.failed)
    counts = {"messages": int(outcome.told), "delivered": outcome.taken, "failed": len(outcome.failed)}
    ledger.controls.add(settings.deployment, COUNTS, counts)
    if outcome.told:
        told.messages.append(message.title)
    return outcome.told
