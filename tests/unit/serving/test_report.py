import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.serving.client import Generation
from tide_platform.serving.report import acceptance_by_position, percentile, summarize

HISTOGRAMS = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=8)


def reply(meta: dict[str, object]) -> dict[str, object]:
    base = {"id": "r", "prompt_tokens": 5, "completion_tokens": 9, "finish_reason": {"type": "stop"}}
    return {"text": "t", "output_ids": [1, 2], "meta_info": base | meta}


def test_acceptance_comes_from_drafts_and_rounds_not_from_tokens():
    meta = {"spec_verify_ct": 4, "spec_num_correct_drafts": 4, "spec_correct_drafts_histogram": [1, 2, 1]}
    generation = Generation.from_reply(reply(meta | {"spec_accept_length": 2.25}), 0.5)
    report = summarize([generation], [], wall_s=2.0, concurrency=1)
    assert report.acceptance_length == 2.0
    assert report.by_position == [3 / 4, 1 / 3]
    assert report.tokens_per_s == 4.5 and generation.finish_reason == "stop"


def test_without_speculation():
    report = summarize([Generation.from_reply(reply({}), 0.5)], ["failed"], wall_s=1.0, concurrency=1)
    assert report.acceptance_length is None and report.by_position == [] and report.errors == ["failed"]


def test_ratio_of_sums_over_requests():
    def request(rounds, accepted):
        meta = {"spec_verify_ct": rounds, "spec_num_correct_drafts": accepted}
        return Generation.from_reply(reply(meta), 1.0)

    report = summarize([request(1, 2), request(9, 0)], [], wall_s=1.0, concurrency=2)
    assert report.acceptance_length == pytest.approx(1.2)


@given(HISTOGRAMS)
def test_positions_multiply_to_the_acceptance_length(histograms):
    rounds = sum(map(sum, histograms))
    accepted = sum(count * index for histogram in histograms for index, count in enumerate(histogram))
    product, length = 1.0, 1.0
    for share in acceptance_by_position(histograms):
        product *= share
        length += product
    assert length == pytest.approx(1 + accepted / rounds if rounds else 1.0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentile_is_a_value_that_was_seen(values, share):
    ordered = sorted(values)
    assert percentile(ordered, share) in ordered
    assert percentile(ordered, 1.0) == ordered[-1] and percentile(ordered, 0.0) == ordered[0]


def test_json_leaves_texts_out():
    raw = summarize([Generation.from_reply(reply({}), 0.5)], [], 1.0, 1).to_json(per_request=True)
    assert "text" not in raw["per_request"][0] and raw["per_request"][0]["latency_s"] == 0.5
