"""What a round costs is taken from two latencies; copies that part are an error."""

from collections.abc import Sequence
from typing import Any

import pytest

from tide_platform.bench import load, serve
from tide_platform.serving.client import Generation


def answer(tokens: int, rounds: list[int], latency_s: float) -> list[Generation]:
    return [Generation("r", "", [], 5, tokens, n, 0, [], latency_s, "length") for n in rounds]


def fake(monkeypatch: pytest.MonkeyPatch, rounds: list[int], whole_s: float) -> None:
    def at_once(server: Any, inputs: Sequence[Any], new_tokens: int) -> list[Generation]:
        return answer(new_tokens, rounds, 0.5 if new_tokens == 1 else whole_s)

    monkeypatch.setattr(load, "at_once", at_once)


def test_a_round_is_what_is_left_when_the_prompt_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = None
    fake(monkeypatch, [20, 20], 2.5)
    assert serve._round(server, 2, [[1], [1]]) == (pytest.approx(100.0), (serve.NEW_TOKENS - 1) / 20)
    fake(monkeypatch, [0, 0], 0.5 + 0.039 * (serve.NEW_TOKENS - 1))
    assert serve._round(server, 0, [[1], [1]])[0] == pytest.approx(39.0)


def test_copies_that_part_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = None
    fake(monkeypatch, [20, 25], 2.5)
    with pytest.raises(serve.BatchDivided, match="k = 3"):
        serve._round(server, 3, [[1], [1]])
