"""The history of live requests: each counted once, whatever dies, restarts or is told twice."""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from control_fakes import LiveServer

from tide_platform.control import quantiles
from tide_platform.control.history import MIXED, History, batch_of, histogram, observe, total
from tide_platform.control.ledger import Ledger


@pytest.fixture
def history(ledger_url: str) -> Iterator[History]:
    ledger = Ledger(ledger_url, clock=lambda: 1e9 + 1000)
    yield ledger.history
    ledger.close()


def test_requests_are_added_up_once(history: History):
    server = LiveServer()
    server.serve(3)
    server.serve(1, tenant="bob", accepted=0)
    told = observe(history, "demo", server)
    assert [one["tenant"] for one in told] == ["ann"] * 3 + ["bob"]
    new = history.blocks("demo")
    assert {(b.tenant, b.batch, b.requests, b.rounds, b.accepted) for b in new} == {
        ("ann", 4, 3, 12, 12),
        ("bob", 1, 1, 4, 0),
    }
    assert observe(history, "demo", server) == []
    history.record("demo", server.base_url, server.requests(0))  # an answer that came late
    assert total(history.blocks("demo")).requests == 4
    ann = next(b for b in new if b.tenant == "ann")
    assert ann.acceptance_length == 2.0 and ann.mean_token_ms == pytest.approx(1000 / 8)
    assert ann.quantile_ms(0.5) == pytest.approx(1000 / 8, rel=0.026)
    assert histogram(history.steps("demo")) == {1: 4, 3: 4}
    assert history.blocks("other") == []


def test_answers_come_in_pages(history: History):
    server = LiveServer()
    server.most = 2
    for _ in range(7):
        server.serve()
    assert len(observe(history, "demo", server)) == 7
    assert total(history.blocks("demo")).requests == 7


@pytest.mark.parametrize("served_before", [1, 5])
def test_a_restarted_server_is_read_from_its_beginning(history: History, served_before: int):
    server = LiveServer()
    for _ in range(served_before):
        server.serve()
    observe(history, "demo", server)
    server.start()
    for _ in range(3):
        server.serve()
    observe(history, "demo", server)
    assert total(history.blocks("demo")).requests == served_before + 3
    assert histogram(history.steps("demo")) == {1: 4 * (served_before + 3)}


def test_an_answer_from_a_life_before_is_left_out(history: History):
    server = LiveServer()
    server.serve()
    old = server.requests(0)
    server.start()
    server.serve()
    observe(history, "demo", server)
    history.record("demo", server.base_url, old)
    assert total(history.blocks("demo")).requests == 1


def test_requests_that_straddle_a_reload_are_nobodys(history: History):
    server = LiveServer()
    server.serve()
    req: Any = SimpleNamespace(
        origin_input_ids=[0], output_ids=[1], spec_verify_ct=2, spec_num_correct_drafts=1
    )
    server.live.prefill([req])
    server.reload("d2")
    server.live.ended(req, "ann", 4, "stop")
    server.serve()
    observe(history, "demo", server)
    assert {b.draft: b.requests for b in history.blocks("demo")} == {"d1": 1, MIXED: 1, "d2": 1}


def test_what_a_server_forgot_is_counted(history: History):
    server = LiveServer()
    server.serve()
    observe(history, "demo", server)
    for _ in range(4096 + 10):
        server.serve()
    observe(history, "demo", server)
    assert history.missed("demo") == 10
    assert total(history.blocks("demo")).requests == 1 + 4096


def test_old_blocks_become_one_an_hour_and_no_sum_changes(history: History):
    draw = random.Random(3)
    now, server = history._clock(), LiveServer()
    server.now = now - 3 * 86_400
    while server.now < now - 100:
        server.serve(draw.randint(1, 3), tenant=draw.choice("ab"), accepted=draw.randint(0, 8))
        observe(history, "demo", server)
        server.now += draw.randint(60, 3000)
    before, steps = history.blocks("demo"), histogram(history.steps("demo"))
    saved = history.thin("demo")
    after = history.blocks("demo")
    # steps are told of with the time at which they were read, here the same for all
    assert saved > 0 and len(after) == len(before) - saved
    for tenant in "ab":
        one, other = (total([b for b in blocks if b.tenant == tenant]) for blocks in (before, after))
        assert (one.requests, one.rounds, one.accepted) == (other.requests, other.rounds, other.accepted)
        assert one.token_ms == other.token_ms and one.decode_s == pytest.approx(other.decode_s)
    assert histogram(history.steps("demo")) == steps
    day_old = [b for b in after if b.ended_at > now - 86_400]
    assert day_old == [b for b in before if b.ended_at > now - 86_400], "what is young stays as it is"
    assert history.thin("demo") == 0


def test_a_quantile_is_off_by_no_more_than_its_bucket():
    draw = np.random.default_rng(0)
    values = draw.lognormal(3, 1, 5000)
    parts = [quantiles.sketch(part) for part in np.array_split(values, 7)]
    counts = quantiles.merged(parts)
    for share in (0.01, 0.5, 0.99):
        assert quantiles.quantile(counts, share) == pytest.approx(np.quantile(values, share), rel=0.035)
    assert quantiles.quantile({}, 0.5) is None


def test_the_batch_is_the_power_of_two_above():
    sizes = [batch_of(c) for c in (None, 0.5, 1.0, 1.2, 2.0, 3.1, 4.0, 9.7)]
    assert sizes == [1, 1, 1, 2, 2, 4, 4, 16]
    assert all(a <= b for a, b in itertools.pairwise(sizes))
