"""The lease: one holder, moves when it must, believes no clock but its own."""

import time

import pytest

from tide_platform.config.schema import Storage
from tide_platform.store.errors import StoreUnavailable
from tide_platform.store.lease import Holder, StoreLease
from tide_platform.store.objects import ObjectStore

ELSEWHERE = Holder("another machine", 1, 1)


@pytest.fixture
def objects(tmp_path):
    return ObjectStore(Storage(uri=str(tmp_path / "store")))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def candidates(objects, count, clock=None, holder=ELSEWHERE):
    clock = clock or Clock()
    return clock, *(StoreLease(objects, "demo/leases/x", 10, clock, holder) for _ in range(count))


def test_one_holds_it_and_the_next_when_it_lets_go(objects):
    clock, first, second = candidates(objects, 2)
    assert first.try_hold() and not second.try_hold() and first.epoch == 1
    first.release()
    clock.now += 2
    assert second.try_hold() and second.epoch == 2 and not first.try_hold()
    assert len(objects.list("demo/leases/x/")) == 1, "former epochs are cleaned away"


def test_it_moves_when_the_holder_gives_no_sign(objects):
    clock, first, second = candidates(objects, 2)
    assert first.try_hold()
    for _ in range(20):
        clock.now += 3.5
        assert first.try_hold() and not second.try_hold(), "renewed in time"
    for _ in range(3):
        clock.now += 3.5
        second.try_hold()
    assert second.epoch == 2 and second.taken == 1
    assert not first.try_hold() and first.epoch == 0, "it finds out at its next renewal"


def test_a_dead_holder_of_this_machine_is_replaced_at_once(objects):
    here = Holder.here()
    _, first = candidates(objects, 1, holder=Holder(here.machine, here.pid, here.started + 1))
    _, second = candidates(objects, 1, holder=here)
    assert first.try_hold() and second.try_hold() and second.epoch == 2


def test_clocks_that_go_back_change_nothing(objects, monkeypatch):
    """Beats are compared, never times: of the wall clock, of another machine, or of the store."""
    clock, first, second = candidates(objects, 2)
    assert first.try_hold()
    real = time.time
    for hours in (-5, 0, 7, -900):
        monkeypatch.setattr(time, "time", lambda hours=hours: real() + 3600 * hours)
        clock.now += 3.5
        assert first.try_hold() and not second.try_hold()
    other = Clock()
    other.now = -1e6  # another machine's monotonic clock starts elsewhere
    third = StoreLease(objects, "demo/leases/x", 10, other, ELSEWHERE)
    for _ in range(5):
        clock.now, other.now = clock.now + 3.5, other.now + 3.5
        assert first.try_hold() and not third.try_hold()


def test_damaged_lease_files_cost_time_only(objects):
    clock, first, second = candidates(objects, 2)
    assert first.try_hold()
    (claim,) = objects.list("demo/leases/x/")
    objects.put_bytes(claim, b"\xff{garbage")
    objects.put_bytes(claim.replace(".json", ".beat"), b"\x00")
    objects.put_bytes("demo/leases/x/notes.json", b"{}")
    assert not second.try_hold()
    clock.now += 3.5
    assert first.try_hold() and not second.try_hold()
    for _ in range(5):
        clock.now += 2.5
        second.try_hold()
    assert second.epoch == 2


def test_two_that_claim_one_epoch(objects, monkeypatch):
    _, first, second = candidates(objects, 2)
    monkeypatch.setattr(second, "_newest", iter([0, 1]).__next__)  # it looked before the first claimed
    assert first.try_hold() and not second.try_hold()


def test_a_claim_made_too_late_is_withdrawn(objects, monkeypatch):
    _, first, late = candidates(objects, 2)
    objects.put_bytes("demo/leases/x/000000000007.json", b"{}")
    real, answers = late._newest, iter([3])
    monkeypatch.setattr(late, "_newest", lambda: next(answers, None) or real())
    assert not late.try_hold() and late.epoch == 0
    assert objects.list("demo/leases/x/") == ["demo/leases/x/000000000007.json"]
    assert not first.try_hold()


def test_a_holder_that_cannot_renew_gives_up_in_time(objects, monkeypatch):
    clock, lease = candidates(objects, 1)
    assert lease.try_hold()

    def down(*_):
        raise StoreUnavailable("x", "down")

    monkeypatch.setattr(objects, "put_bytes", down)
    clock.now += 4
    with pytest.raises(StoreUnavailable):
        lease.try_hold()
    assert lease.epoch == 1
    clock.now += 7
    with pytest.raises(StoreUnavailable):
        lease.try_hold()
    assert lease.epoch == 0
