"""Rows of a step reach the writer at their positions, with the tokens that are certain."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.engine.capture import Capture, OpenSample
from tide_platform.engine.policy import Request
from tide_platform.engine.steps import (
    DirectStager,
    Planned,
    PrefillStep,
    VerifyStep,
    plan_request,
    tokens_between,
)
from tide_platform.engine.teacher import teacher_rows

K, WIDTH, VOCABULARY = 4, 6, 64


class Recorder(Capture):
    """A capture that keeps what it is told to write."""

    def __init__(self) -> None:
        self.written: list[dict[str, Any]] = []

    def saw_round(self, sample: OpenSample, k: int) -> None:
        assert k == 2

    def write(self, sample, pos, aux, teacher_pos, rows, tokens_pos=0, tokens=None) -> None:
        self.written.append(
            {
                "sample": sample.sample_id,
                "pos": pos,
                "aux": aux,
                "teacher_pos": teacher_pos,
                "rows": rows,
                "tokens": (tokens_pos, tokens.tolist()),
            }
        )


def _sample(name: str, prompt: int = 3, start: int = 0) -> OpenSample:
    sample = OpenSample(name, Request(name, prompt, 0.0, 1.0, 1), "d", start, 1.0, 2)
    sample.next_token = start
    return sample


def _planned(place: int, name: str, start: int = 0) -> Planned:
    return Planned(place, _sample(name, start=start), 0, np.array([7], np.int32))


def _values(aux: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(aux.view(np.int16).copy()).view(torch.bfloat16).float()


@pytest.mark.parametrize("raw_planned", [False, True])
def test_accepted_rows_of_planned_requests_are_written(raw_planned: bool) -> None:
    seed = torch.Generator().manual_seed(0)
    hidden = torch.randn(3 * 3, WIDTH, generator=seed).bfloat16().float()
    logits = torch.randn(3 * 3, VOCABULARY, generator=seed)
    predict = torch.arange(9, dtype=torch.int32)
    capture = Recorder()
    raw = torch.cat([logits[3:6], logits[6:9]]) if raw_planned else logits
    plan = [_planned(1, "b"), _planned(2, "c")]  # request 0 is not captured
    accepted, lengths = torch.tensor([1, 2, 3]), torch.tensor([5, 10, 20])
    DirectStager(capture, K).stage(VerifyStep(plan, 3, hidden, raw, raw_planned, predict, accepted, lengths))
    first, second = capture.written
    assert (first["sample"], first["pos"], first["teacher_pos"], len(first["aux"])) == ("b", 10, 10, 2)
    assert (second["sample"], second["pos"], second["teacher_pos"], len(second["aux"])) == ("c", 20, 20, 3)
    assert torch.equal(_values(first["aux"]), hidden[3:5])
    assert torch.equal(_values(second["aux"]), hidden[6:9])
    for written, rows in ((first, slice(3, 5)), (second, slice(6, 9))):
        expected = teacher_rows(logits[rows], K, predict[rows])
        assert (written["rows"].ids == expected.ids).all()
        np.testing.assert_array_equal(written["rows"].token_logp, expected.token_logp)
        assert written["tokens"] == (0, [7])


def test_a_prompts_rows_before_the_kept_tail_are_cut() -> None:
    hidden = torch.arange(10.0).view(-1, 1).expand(10, WIDTH)
    plan = [_planned(0, "whole"), _planned(1, "tail", start=102), _planned(2, "early", start=900)]
    plan[2] = Planned(2, plan[2].sample, 900, np.zeros(0, np.int32))
    step = PrefillStep(plan, hidden, [0, 100, 50], [4, 4, 2], [0, 4, 8], [])
    capture = Recorder()
    DirectStager(capture, K).stage(step)
    whole, tail = capture.written  # nothing is left of "early"
    assert (whole["pos"], _values(whole["aux"])[:, 0].tolist()) == (0, [0, 1, 2, 3])
    assert (tail["pos"], _values(tail["aux"])[:, 0].tolist()) == (102, [6, 7])
    assert len(tail["rows"].token_logp) == 0


def test_the_last_row_of_a_retracted_request_has_its_teacher() -> None:
    raw = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    plan = [_planned(0, "a"), _planned(3, "b")]
    hidden = torch.zeros(9, WIDTH)
    step = PrefillStep(plan, hidden, [0, 2], [4, 5], [0, 4], [1], raw, torch.tensor([9]))
    capture = Recorder()
    DirectStager(capture, K).stage(step)
    a, b = capture.written
    assert len(a["rows"].token_logp) == 0
    expected = teacher_rows(raw, K, torch.tensor([9]))
    assert b["teacher_pos"] == 6 and (b["rows"].ids == expected.ids).all()


@given(st.lists(st.integers(0, 99), max_size=9), st.lists(st.integers(0, 99), max_size=9), st.data())
def test_tokens_between_positions(prompt: list[int], response: list[int], data: st.DataObject) -> None:
    whole = prompt + response
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(0, len(whole)))
    tokens = tokens_between(prompt, response, start, end)
    assert tokens.dtype == np.int32 and tokens.tolist() == whole[start:end]


@given(st.integers(0, 12), st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 5))
def test_each_token_is_given_once_and_in_order(start: int, rounds: list[int], chunk: int) -> None:
    prompt, response = list(range(12)), list(range(100, 100 + sum(rounds)))
    sample, given = _sample("a", 12, start), []
    ends = [*range(chunk, 12, chunk), 12]
    for end in ends:
        given.append(plan_request(0, sample, prompt, [], end))
    known = 0
    for count in rounds:
        known += count
        given.append(plan_request(0, sample, prompt, response[:known], 12 + known))
    assert [t for planned in given for t in planned.tokens] == (prompt + response)[start:]
    position = start
    for planned in given:
        assert planned.tokens_pos == position
        position += len(planned.tokens)
    # a retracted request is prefilled again: nothing is given twice
    assert len(plan_request(0, sample, prompt, response, 14).tokens) == 0
