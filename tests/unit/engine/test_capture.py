"""The life of a captured request, and that none of them leaves anything behind."""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.capture.record import SampleMeta
from tide_platform.engine.capture import Capture, Ending, OpenSample, Origin
from tide_platform.engine.policy import Budget, Policy, Request
from tide_platform.engine.teacher import TeacherRows

K, WIDTH = 4, 6


class FakeWriter:
    """Remembers what was written; `full` makes the ring full."""

    def __init__(self) -> None:
        self.dropped: Counter = Counter()
        self.begun: list[SampleMeta] = []
        self.rows: dict[str, list[tuple[int, int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.updates: list[dict[str, Any]] = []
        self.finished: list[tuple[SampleMeta, list[int]]] = []
        self.dead: set[str] = set()
        self.full = False

    def begin(self, rid: str, meta: SampleMeta) -> bool:
        self.begun.append(meta)
        self.rows[rid], self.tokens[rid] = [], []
        return not self.full or self.drop(rid, "ring_full")

    def write(
        self, rid, pos, aux, teacher_pos, teacher_ids, teacher_logp, token_logp, tokens_pos, tokens, last
    ) -> bool:
        if self.full:
            return self.drop(rid, "ring_full")
        self.rows[rid].append((pos, len(aux)))
        self.tokens[rid] += tokens.tolist()
        return True

    def update(self, rid: str, **changed: Any) -> None:
        assert rid in self.rows or rid in self.dead
        self.updates.append(changed)

    def finish(self, rid: str, meta: SampleMeta, tokens_pos: int, tokens: np.ndarray) -> bool:
        if rid in self.dead:
            self.dead.remove(rid)
            return False
        del self.rows[rid]
        before = self.tokens.pop(rid)[: tokens_pos - meta.start_pos]
        self.finished.append((meta, before + tokens.tolist()))
        return True

    def discard(self, rid: str, reason: str) -> None:
        if rid in self.dead:
            self.dead.remove(rid)
        else:
            self.drop(rid, reason)
            self.dead.remove(rid)

    def drop(self, rid: str, reason: str) -> bool:
        del self.rows[rid], self.tokens[rid]
        self.dead.add(rid)
        self.dropped[reason] += 1
        return False


def _request(rid: str = "r", prompt_tokens: int = 3, **options: object) -> Request:
    return Request(rid, prompt_tokens, temperature=0.0, top_p=1.0, top_k=1, options=dict(options))


def _capture(prompt_tail_tokens: int | None = None, **changed: object) -> tuple[Capture, FakeWriter]:
    policy = {"enabled": True, "default": "allow", "sampling_rate": 1.0, **changed}
    writer = FakeWriter()
    origin = Origin("t", "greedy", "unit")
    capture = Capture(writer, Policy(**policy), origin, "draft-1", 2, prompt_tail_tokens)  # type: ignore[arg-type]
    return capture, writer


def _open(capture: Capture, request: Request) -> OpenSample:
    sample = capture.admit(request, now=5.0)
    assert sample is not None
    capture.begin(sample)
    return sample


def _rows(count: int) -> TeacherRows:
    last = np.zeros((count, 0), np.uint16)
    return TeacherRows(
        np.zeros((count, K), np.int32), np.zeros((count, K), np.float16), np.zeros(count, np.float16), last
    )


def _write(capture: Capture, sample: OpenSample, pos: int, count: int, teachers: int) -> None:
    capture.write(sample, pos, np.zeros((count, WIDTH), np.uint16), pos, _rows(teachers))


def _end(tokens: int, reason: str = "stop", retracted: bool = False) -> Ending:
    return Ending(tokens, 0, np.arange(tokens, dtype=np.int32), reason, 1.0, 2, 1, retracted)


def test_refused_requests_are_counted_by_reason() -> None:
    capture, writer = _capture(sampling_rate=0.0)
    assert capture.admit(_request(), 1.0) is None
    assert capture.admit(Request("r", 3, 0.0, 1.0, 1, unsupported="lora"), 1.0) is None
    assert capture.status()["skipped"] == {"sampled_out": 1, "lora": 1}
    assert writer.begun == []


def test_what_was_not_believed_is_counted_beside() -> None:
    capture, _ = _capture()
    capture.admit(_request(ignored="untrusted"), 1.0)
    assert capture.status()["ignored"] == {"untrusted": 1}
    assert capture.status()["skipped"] == {}


def test_a_sample_begins_with_what_is_known() -> None:
    capture, writer = _capture()
    _open(capture, _request("mine", tenant="acme", tool_calls=True))
    (meta,) = writer.begun
    assert (meta.request_id, meta.tenant, meta.num_tokens, meta.finish_reason) == ("mine", "acme", 0, "")
    assert (meta.captured_at, meta.start_pos, meta.flags) == (5.0, 0, ("tool_calls",))


def test_a_request_from_first_row_to_sample() -> None:
    capture, writer = _capture()
    sample = _open(capture, _request("mine", tenant="acme"))
    _write(capture, sample, 0, 3, 0)
    capture.draft_changed("draft-2")
    assert writer.updates == [{"draft_version_end": "draft-2"}]
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
    sample = _open(capture, Request("r", 3, 0.5, 0.9, 5, penalties=True, grammar=True, thinking=True))
    _write(capture, sample, 2, 3, 3)  # rows 0 and 1 came from the prefix cache
    capture.close(sample, _end(6, "abort", retracted=True))
    assert set(writer.finished[0][0].flags) == {
        "truncated_context",
        "penalties",
        "grammar",
        "thinking",
        "aborted",
        "retracted",
    }


def test_rows_written_again_are_no_hole() -> None:
    capture, writer = _capture()
    sample = _open(capture, _request())
    _write(capture, sample, 0, 5, 2)
    _write(capture, sample, 0, 5, 1)
    _write(capture, sample, 5, 1, 1)
    capture.close(sample, _end(7, retracted=True))
    assert writer.finished[0][0].flags == ("retracted",)


def test_two_requests_of_one_id_are_two_samples() -> None:
    capture, writer = _capture()
    first, second = _open(capture, _request("same")), _open(capture, _request("same"))
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
        sample = _open(capture, _request(f"r{number}"))
        _write(capture, sample, 0, 3, 0)
        if teachers:
            _write(capture, sample, 3, teachers, teachers)
        capture.close(sample, _end(4 + teachers, reason))
    assert capture.open == {}
    assert writer.rows == {} and writer.dead == set()
    lost = sum(full for _, _, full in requests)
    assert capture.status()["dropped"] == ({"ring_full": lost} if lost else {})


def test_a_lost_sample_costs_nothing_more() -> None:
    capture, writer = _capture()
    sample = _open(capture, _request())
    writer.full = True
    _write(capture, sample, 0, 3, 0)
    writer.full = False
    _write(capture, sample, 3, 1, 1)
    assert sample.lost and writer.rows == {}
    assert writer.dropped == {"ring_full": 1}


def test_giving_up_drops_what_is_open() -> None:
    capture, writer = _capture()
    sample = _open(capture, _request())
    _write(capture, sample, 0, 3, 1)
    capture.give_up("error")
    capture.close(sample, _end(5))
    assert capture.open == {} and sample.lost and writer.finished == []
    assert capture.status()["dropped"] == {"error": 1}


def test_a_full_ring_at_admission_loses_the_sample_once() -> None:
    capture, writer = _capture()
    writer.full = True
    sample = _open(capture, _request())
    assert sample.lost
    writer.full = False
    _write(capture, sample, 0, 3, 1)
    capture.close(sample, _end(5))
    assert writer.dropped == {"ring_full": 1} and writer.finished == [] and writer.dead == set()


def test_only_the_tail_of_a_long_prompt_is_kept() -> None:
    capture, writer = _capture(prompt_tail_tokens=4)
    sample = _open(capture, _request(prompt_tokens=10))
    assert (sample.start_pos, sample.next_token, writer.begun[0].start_pos) == (6, 6, 6)
    _write(capture, sample, 6, 4, 0)
    _write(capture, sample, 10, 2, 2)
    capture.close(sample, Ending(13, 6, np.arange(6, 13, dtype=np.int32), "stop", 1.0, 1, 1, False))
    ((meta, ids),) = writer.finished
    assert (meta.start_pos, meta.num_tokens, meta.prompt_tokens, ids) == (6, 7, 10, list(range(6, 13)))
    assert meta.flags == ("truncated_context",)
    assert _open(capture, _request(prompt_tokens=3)).start_pos == 0


def test_a_response_that_grows_too_long_is_given_up_once() -> None:
    capture, writer = _capture(max_request_tokens=6)
    sample = _open(capture, _request())
    _write(capture, sample, 0, 3, 0)
    _write(capture, sample, 3, 3, 3)
    assert not sample.lost
    _write(capture, sample, 6, 1, 1)
    _write(capture, sample, 7, 1, 1)
    capture.close(sample, _end(9))
    assert writer.dropped == {"too_long": 1} and writer.finished == []
    assert capture.status()["skipped"] == {"too_long": 1} and capture.status()["dropped"] == {}


def test_k_that_changes_is_said() -> None:
    capture, writer = _capture()
    sample = _open(capture, _request())
    capture.saw_round(sample, 1)  # the first round's k is no change, whatever the server started with
    assert writer.updates == [{"k": 1}] and not sample.adaptive
    for k in (1, 3, 0, 3):
        capture.saw_round(sample, k)
    assert writer.updates == [{"k": 1}, {"flags": ("adaptive_k",)}, {"k": 3}]
    _write(capture, sample, 0, 4, 1)
    capture.close(sample, _end(5))
    assert writer.finished[0][0].k == 3 and writer.finished[0][0].flags == ("adaptive_k",)


def test_what_is_written_is_taken_from_the_budget() -> None:
    capture, _ = _capture(budget=Budget(100, lambda: 0.0))
    sample = _open(capture, _request())
    _write(capture, sample, 0, 3, 3)
    written = 3 * WIDTH * 2 + 3 * (6 * K + 2)
    assert capture.bytes == written > 100
    assert capture.admit(_request(), 1.0) is None
    assert capture.status()["skipped"] == {"budget": 1}
