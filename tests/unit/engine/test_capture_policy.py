"""Which requests are captured, and that none of them leaves anything behind."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.capture.record import SampleMeta
from tide_platform.engine.capture import Capture, Ending, OpenSample, Origin, Policy, Request, fraction
from tide_platform.engine.teacher import TeacherRows

K, WIDTH = 4, 6


class FakeWriter:
    """Remembers what was written; `full` makes the ring full."""

    def __init__(self) -> None:
        self.dropped: Counter = Counter()
        self.rows: dict[str, list[tuple[int, int]]] = {}
        self.finished: list[tuple[SampleMeta, np.ndarray]] = []
        self.full = False

    def write(self, rid, pos, aux, teacher_pos, teacher_ids, teacher_logp, token_logp) -> bool:
        if self.full:
            self.dropped["ring_full"] += 1
            return False
        self.rows.setdefault(rid, []).append((pos, len(aux)))
        return True

    def finish(self, rid: str, meta: SampleMeta, input_ids: np.ndarray) -> bool:
        if self.rows.pop(rid, None) is None:
            return False
        self.finished.append((meta, input_ids))
        return True

    def discard(self, rid: str, reason: str) -> None:
        self.rows.pop(rid, None)
        self.dropped[reason] += 1


def _request(rid: str = "r", **options: object) -> Request:
    return Request(rid=rid, prompt_tokens=3, temperature=0.0, top_p=1.0, top_k=1, options=dict(options))


def _capture(**changed: object) -> tuple[Capture, FakeWriter]:
    policy = {"enabled": True, "default": "allow", "sampling_rate": 1.0, **changed}
    writer = FakeWriter()
    return Capture(writer, Policy(**policy), Origin("t", "greedy", "unit"), "draft-1", 2), writer


def _rows(count: int) -> TeacherRows:
    return TeacherRows(
        np.zeros((count, K), np.int32), np.zeros((count, K), np.float16), np.zeros(count, np.float16)
    )


def _write(capture: Capture, sample: OpenSample, pos: int, count: int, teachers: int) -> None:
    capture.write(sample, pos, np.zeros((count, WIDTH), np.uint16), pos, _rows(teachers))


def _end(tokens: int, reason: str = "stop", retracted: bool = False) -> Ending:
    return Ending(np.arange(tokens, dtype=np.int32), reason, 1.0, 2, 1, retracted)


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ({}, {}, None),
        ({}, {"train": "deny"}, "opt_out"),
        ({"default": "deny"}, {}, "opt_out"),
        ({"default": "deny"}, {"train": "allow"}, None),
        ({"deny_tenants": frozenset({"acme"})}, {"tenant": "acme", "train": "allow"}, "tenant"),
        ({"sampling_rate": 0.0}, {}, "sampled_out"),
        ({"enabled": False}, {}, "disabled"),
    ],
)
def test_policy(policy: dict, options: dict, reason: str | None) -> None:
    capture, _ = _capture(**policy)
    sample = capture.admit(_request(**options))
    assert (sample is None) == (reason is not None)
    assert capture.status()["skipped"] == ({reason: 1} if reason else {})


def test_unsupported_requests_are_counted_by_their_name() -> None:
    capture, _ = _capture()
    assert capture.admit(Request("r", 3, 0.0, 1.0, 1, unsupported="lora")) is None
    assert capture.status()["skipped"] == {"lora": 1}


@given(st.lists(st.text(), min_size=1, max_size=50, unique=True), st.floats(0, 1))
def test_sampling_depends_on_the_root_alone(roots: list[str], rate: float) -> None:
    policy = Policy(True, "allow", rate)
    for root in roots:
        decisions = {policy.refusal(_request(rid, conversation=root)) for rid in ("a", "b", "c")}
        assert len(decisions) == 1 or not root  # an empty conversation is none: the request's id counts
        assert 0 <= fraction(root) < 1


def test_sampling_keeps_about_the_rate() -> None:
    policy = Policy(True, "allow", 0.3)
    kept = sum(policy.refusal(_request(f"r{i}")) is None for i in range(4000))
    assert 0.27 < kept / 4000 < 0.33


def test_a_request_from_first_row_to_sample() -> None:
    capture, writer = _capture()
    sample = capture.admit(_request("mine", tenant="acme"))
    assert sample is not None
    _write(capture, sample, 0, 3, 0)
    capture.draft_version = "draft-2"
    _write(capture, sample, 3, 2, 2)
    capture.close(sample, _end(6))
    ((meta, ids),) = writer.finished
    assert (meta.request_id, meta.tenant, meta.num_tokens, len(ids)) == ("mine", "acme", 6, 6)
    assert (meta.draft_version_start, meta.draft_version_end) == ("draft-1", "draft-2")
    assert (meta.verify_rounds, meta.accepted_drafts, meta.k) == (2, 1, 2)
    assert meta.flags == ()
    assert capture.status()["samples"] == 1


def test_flags_say_what_is_special() -> None:
    capture, writer = _capture()
    sample = capture.admit(Request("r", 3, 0.5, 0.9, 5, penalties=True, grammar=True))
    assert sample is not None
    _write(capture, sample, 2, 3, 3)  # rows 0 and 1 came from the prefix cache
    capture.close(sample, _end(6, "abort", retracted=True))
    assert set(writer.finished[0][0].flags) == {
        "truncated_context",
        "penalties",
        "grammar",
        "aborted",
        "retracted",
    }


def test_rows_written_again_are_no_hole() -> None:
    capture, writer = _capture()
    sample = capture.admit(_request())
    assert sample is not None
    _write(capture, sample, 0, 5, 2)
    _write(capture, sample, 0, 5, 1)
    _write(capture, sample, 5, 1, 1)
    capture.close(sample, _end(7, retracted=True))
    assert writer.finished[0][0].flags == ("retracted",)


def test_two_requests_of_one_id_are_two_samples() -> None:
    capture, writer = _capture()
    first, second = capture.admit(_request("same")), capture.admit(_request("same"))
    assert first is not None and second is not None
    for sample in (first, second):
        _write(capture, sample, 0, 4, 1)
        capture.close(sample, _end(5))
    assert len({meta.sample_id for meta, _ in writer.finished}) == 2


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["stop", "length", "abort"]), st.booleans()), max_size=30
    )
)
def test_nothing_is_left_however_requests_end(requests: list[tuple[int, str, bool]]) -> None:
    capture, writer = _capture()
    for number, (teachers, reason, full) in enumerate(requests):
        writer.full = full
        sample = capture.admit(_request(f"r{number}"))
        assert sample is not None
        _write(capture, sample, 0, 3, 0)
        if teachers:
            _write(capture, sample, 3, teachers, teachers)
        capture.close(sample, _end(4 + teachers, reason))
    assert capture.open == {}
    assert writer.rows == {}
    lost = sum(full for _, _, full in requests)
    assert capture.status()["dropped"] == ({"ring_full": lost} if lost else {})


def test_a_lost_sample_costs_nothing_more() -> None:
    capture, writer = _capture()
    sample = capture.admit(_request())
    assert sample is not None
    writer.full = True
    _write(capture, sample, 0, 3, 0)
    writer.full = False
    _write(capture, sample, 3, 1, 1)
    assert sample.lost and writer.rows == {}
    assert writer.dropped == {"ring_full": 1}


def test_giving_up_drops_what_is_open() -> None:
    capture, _ = _capture()
    sample = capture.admit(_request())
    assert sample is not None
    _write(capture, sample, 0, 3, 1)
    capture.give_up("error")
    assert capture.open == {} and sample.lost
    assert capture.status()["dropped"] == {"error": 1}
