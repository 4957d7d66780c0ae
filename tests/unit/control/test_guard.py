"""Frozen deployments and barred drafts."""

from collections.abc import Iterator

import pytest

from tide_platform.control.audit import Action
from tide_platform.control.guard import Barred, Frozen
from tide_platform.control.ledger import Ledger


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    ledger = Ledger(ledger_url, clock=lambda: 5.0)
    yield ledger
    ledger.close()


def actions(ledger: Ledger) -> list[Action]:
    return [entry.action for entry in ledger.audit("demo")]


def test_a_frozen_deployment_promotes_nothing_until_it_is_thawed(ledger: Ledger):
    guard = ledger.guard
    guard.check("demo", "abc")
    guard.freeze("demo", "ann@host", "release day")
    guard.freeze("demo", "bob@host", "still")
    with pytest.raises(Frozen, match=r"bob@host: still; `tide freeze --off`"):
        guard.check("demo", "abc")
    guard.check("other", "abc")
    assert guard.thaw("demo", "ann@host", "over") and not guard.thaw("demo", "ann@host", "over")
    guard.check("demo", "abc")
    assert actions(ledger) == [Action.FROZEN, Action.FROZEN, Action.THAWED]


def test_a_barred_draft_needs_a_hand(ledger: Ledger):
    guard = ledger.guard
    guard.bar("demo", "abc", "sensor", "acceptance fell")
    held = guard.barred("demo", "abc")
    assert held is not None and (held.actor, held.at) == ("sensor", 5.0)
    with pytest.raises(Barred, match="acceptance fell"):
        guard.check("demo", "abc")
    guard.check("demo", "def")
    assert guard.unbar("demo", "abc", "ann@host", "tried again") and guard.barred("demo", "abc") is None
    assert not guard.unbar("demo", "abc", "ann@host", "again")
    assert actions(ledger) == [Action.BARRED, Action.UNBARRED]
