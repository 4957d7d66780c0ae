"""Counts of finished requests: who they are told to, which draft served them, what was missed."""

from types import SimpleNamespace
from typing import Any

import pytest

from tide_platform.engine import live as module
from tide_platform.engine.live import Live


def request(prompt: int = 4, rounds: int = 3, accepted: int = 5) -> Any:
    return SimpleNamespace(
        origin_input_ids=[0] * prompt,
        output_ids=[],
        spec_verify_ct=rounds,
        spec_num_correct_drafts=accepted,
    )


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.live = Live("old", clock=lambda: self.now + 1e9, monotonic=lambda: self.now)

    def begin(self, *reqs: Any) -> None:
        self.live.prefill(reqs)
        self.live.prefilled(reqs)
        for req in reqs:
            req.output_ids.append(1)

    def finish(self, req: Any, tokens: int = 9, reason: str = "stop") -> None:
        self.live.ended(req, "ann", tokens, reason)


@pytest.fixture
def world() -> World:
    return World()


def test_a_finished_request_says_what_it_was_worth(world: World) -> None:
    req = request()
    world.begin(req)
    world.now += 0.4
    world.finish(req)
    told = world.live.since(0)
    assert told["requests"] == [
        {
            "number": 1,
            "at": 1e9 + 100.4,
            "tenant": "ann",
            "draft": "old",
            "straddles": False,
            "prompt_tokens": 4,
            "tokens": 9,
            "rounds": 3,
            "accepted": 5,
            "token_ms": pytest.approx(50.0),
            "concurrency": None,
            "reason": "stop",
        }
    ]
    assert (told["last"], told["missed"], told["draft"]) == (1, 0, "old")
    assert world.live.since(1)["requests"] == []
    world.finish(req)
    assert world.live.since(0)["last"] == 1, "a request ends once"


def test_a_request_tells_how_many_ran_beside_it(world: World) -> None:
    first, second = request(), request()
    world.begin(first)
    world.live.decoded(1)
    world.begin(second)
    for _ in range(3):
        world.live.decoded(2)
    world.finish(second)
    world.live.decoded(1)
    world.finish(first)
    told = {one["number"]: one["concurrency"] for one in world.live.since(0)["requests"]}
    assert told == {1: 2.0, 2: pytest.approx((1 + 3 * 2 + 1) / 5)}


def test_requests_that_straddle_a_reload_say_so(world: World) -> None:
    before, during, after = request(), request(), request()
    world.begin(before, during)
    world.finish(before)
    world.live.decoded(2)
    world.live.draft_changed("new")
    world.finish(during)
    world.begin(after)
    world.finish(after)
    told = world.live.since(0)
    assert [(one["draft"], one["straddles"]) for one in told["requests"]] == [
        ("old", False),
        ("old", True),
        ("new", False),
    ]
    assert told["rounds_by_batch"] == {}
    world.live.decoded(2)
    world.live.decoded(2)
    world.live.decoded(1)
    assert world.live.since(0)["rounds_by_batch"] == {"1": 1, "2": 2}


def test_who_asks_too_late_is_told_how_many_it_missed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(module.BUFFER + 10):
        req = request()
        world.begin(req)
        world.finish(req)
    told = world.live.since(5)
    assert told["missed"] == 5 and told["requests"][0]["number"] == 11
    assert len(told["requests"]) == module.MOST and told["last"] == module.BUFFER + 10
    end = world.live.since(told["last"] - 1)
    assert [one["number"] for one in end["requests"]] == [told["last"]] and not end["restarted"]


def test_a_server_that_restarted_tells_all_it_has(world: World) -> None:
    req = request()
    world.begin(req)
    world.finish(req)
    told = world.live.since(700)
    assert told["restarted"] and [one["number"] for one in told["requests"]] == [1]


def test_times_are_of_tokens_behind_the_first(world: World) -> None:
    chunked = request()
    world.live.prefill([chunked])
    world.live.prefilled([chunked])  # the first chunk
    world.now += 5
    world.live.prefill([chunked])
    world.live.prefilled([chunked])
    chunked.output_ids.append(1)
    world.now += 1
    world.live.prefilled([chunked])  # retracted, and prefilled with its response: the clock goes on
    world.now += 1
    world.finish(chunked, tokens=5)
    short = request()
    world.begin(short)
    world.finish(short, tokens=1)
    assert [one["token_ms"] for one in world.live.since(0)["requests"]] == [pytest.approx(500.0), None]


def test_a_request_that_was_never_prefilled_is_not_counted(world: World) -> None:
    world.finish(request(), reason="abort")
    assert world.live.since(0)["last"] == 0
