"""What people are told of the audit, and of what stands as it should not, on both databases."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tide_platform.config import Settings
from tide_platform.control.audit import Action, Entry
from tide_platform.control.happenings import CURSOR, UnknownAction, tell_audit, tell_standing, wanted
from tide_platform.control.ledger import Ledger
from tide_platform.control.notify import COUNTS, Message, Notifier, Outcome


@dataclass
class Listener(Notifier):
    """An address in memory. ``refuses``: titles; ``dies_at``: the process ends behind that title."""

    heard: list[str] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    dies_at: str = ""

    def tell(self, message: Message) -> Outcome:
        if message.title in self.refuses:
            return Outcome(0, ["address 1 (json)"])
        self.heard.append(message.title)
        if message.title == self.dies_at:
            raise KeyboardInterrupt
        return Outcome(1)


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def ledger(ledger_url: str, now: list[float]) -> Iterator[Ledger]:
    ledger = Ledger(ledger_url, clock=lambda: now[0])
    yield ledger
    ledger.close()


def happened(ledger: Ledger, action: Action, digest: str, deployment: str = "demo") -> None:
    ledger.note(Entry(deployment, "ann@host", action, "it was slow", digest=digest))


def test_each_row_is_told_once_in_order_and_only_of_this_deployment(
    settings: Settings, ledger: Ledger
) -> None:
    listener = Listener()
    happened(ledger, Action.ROLLED_BACK, "a")
    happened(ledger, Action.DEPLOYED, "b")
    happened(ledger, Action.ROLLED_BACK, "x", deployment="other")
    happened(ledger, Action.FAILED, "c")
    told = tell_audit(settings, ledger, listener, 1000)
    assert listener.heard == ["demo: draft a rolled back", "demo: draft c failed"] == told.messages
    assert tell_audit(settings, ledger, listener, 1000).summary == "nothing new"
    happened(ledger, Action.FROZEN, "d")
    assert tell_audit(settings, ledger, listener, 1000).messages == ["demo: draft d frozen"]
    other = settings.model_copy(update={"deployment": "other"})
    assert tell_audit(other, ledger, listener, 1000).messages == ["other: draft x rolled back"]
    assert ledger.controls.get("demo", COUNTS) == {"messages": 3, "delivered": 3, "failed": 0}


def test_a_process_that_dies_tells_its_last_message_again_and_no_other(
    settings: Settings, ledger: Ledger
) -> None:
    for digest in "abc":
        happened(ledger, Action.ROLLED_BACK, digest)
    listener = Listener(dies_at="demo: draft b rolled back")
    with pytest.raises(KeyboardInterrupt):
        tell_audit(settings, ledger, listener, 1000)
    tell_audit(settings, ledger, again := Listener(), 1000)
    assert listener.heard + again.heard == [f"demo: draft {digest} rolled back" for digest in "abbc"]


def test_where_all_addresses_refuse_the_row_waits_and_is_given_up_at_last(
    settings: Settings, ledger: Ledger, now: list[float]
) -> None:
    for digest in "ab":
        happened(ledger, Action.ROLLED_BACK, digest)
    listener = Listener(refuses={"demo: draft a rolled back"})
    told = tell_audit(settings, ledger, listener, 1000)
    assert told.waiting and told.failed == 1 and not listener.heard
    assert "it is tried again" in told.summary
    listener.refuses.clear()
    tell_audit(settings, ledger, listener, 1100)
    assert listener.heard == ["demo: draft a rolled back", "demo: draft b rolled back"]
    happened(ledger, Action.ROLLED_BACK, "old")
    now[0] += 5000
    happened(ledger, Action.ROLLED_BACK, "new")
    told = tell_audit(settings, ledger, listener, now[0])
    assert told.too_old == 1 and told.messages == ["demo: draft new rolled back"]
    assert ledger.controls.get("demo", COUNTS)["failed"] == 1


def test_the_place_moves_over_rows_that_nobody_wants(settings: Settings, ledger: Ledger) -> None:
    for _ in range(3):
        happened(ledger, Action.MERGED, "m")
    tell_audit(settings, ledger, Listener(), 1000)
    assert ledger.controls.get("demo", CURSOR) == {"row": 3}


def test_an_action_that_the_audit_does_not_know_is_refused(settings: Settings) -> None:
    settings.notify.actions = ["rolled bakc"]
    with pytest.raises(UnknownAction, match=r"'rolled bakc'; the audit knows .*rolled back"):
        wanted(settings)


def test_a_condition_is_told_when_it_lasts_and_when_it_is_over(settings: Settings, ledger: Ledger) -> None:
    dead = {"capture": Message("demo: capture is dead", "an error")}
    listener, patience = Listener(), settings.notify.patience_s

    def look(at: float, found: dict[str, Message]) -> list[str]:
        return tell_standing(settings, ledger, listener, at, found).messages

    assert look(1000, dead) == []
    assert look(1000 + patience / 2, {}) == []  # it was over before anybody was told
    assert look(2000, dead) == []
    assert look(2000 + patience, dead) == ["demo: capture is dead"]
    assert look(2000 + 2 * patience, dead) == []
    assert look(3000 + patience, {}) == ["demo: capture is dead: over"]
    assert look(3001 + patience, {}) == []


def test_a_condition_that_could_not_be_told_is_told_later(settings: Settings, ledger: Ledger) -> None:
    settings.notify.patience_s = 0
    dead = {"capture": Message("demo: capture is dead", "an error")}
    listener = Listener(refuses={"demo: capture is dead"})
    assert tell_standing(settings, ledger, listener, 1000, dead).waiting
    listener.refuses.clear()
    assert tell_standing(settings, ledger, listener, 1030, dead).messages == ["demo: capture is dead"]
