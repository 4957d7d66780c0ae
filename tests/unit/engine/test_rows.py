"""The hooks around a forward step, on batches made by hand: what reaches the ring, and that a fault there
stops nothing.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tide_platform.capture.record import SampleMeta
from tide_platform.engine.capture import Capture, Origin
from tide_platform.engine.last_hidden import NoLastHidden
from tide_platform.engine.live import Live
from tide_platform.engine.policy import Policy, Request
from tide_platform.engine.rows import RowHooks

K, WIDTH, VOCABULARY = 4, 6, 64


class Ring:
    """A writer that keeps everything."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}
        self.rows: dict[str, dict[int, np.ndarray]] = {}
        self.teachers: dict[str, list[int]] = {}
        self.last: dict[str, dict[int, np.ndarray]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.done: dict[str, tuple[SampleMeta, list[int]]] = {}
        self.names: dict[str, str] = {}

    def begin(self, rid: str, meta: SampleMeta) -> bool:
        self.names[rid] = meta.request_id
        self.rows[meta.request_id], self.teachers[meta.request_id] = {}, []
        self.last[meta.request_id] = {}
        self.tokens[meta.request_id] = []
        return True

    def write(self, rid, pos, aux, teacher_pos, ids, logp, token_logp, tokens_pos, tokens, last) -> bool:
        name = self.names[rid]
        self.rows[name] |= {pos + i: row for i, row in enumerate(aux)}
        self.teachers[name] += range(teacher_pos, teacher_pos + len(token_logp))
        self.last[name] |= {teacher_pos + i: row for i, row in enumerate(last)}
        assert tokens_pos == len(self.tokens[name])
        self.tokens[name] += tokens.tolist()
        return True

    def update(self, rid: str, **changed: Any) -> None: ...

    def finish(self, rid: str, meta: SampleMeta, tokens_pos: int, tokens: np.ndarray) -> bool:
        self.done[meta.request_id] = (meta, self.tokens[meta.request_id][:tokens_pos] + tokens.tolist())
        return True

    def discard(self, rid: str, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


class Sglang:
    def is_health_check(self, req: Any) -> bool:
        return req.rid.startswith("HEALTH")

    def read_request(self, req: Any) -> Request:
        return Request(req.rid, len(req.origin_input_ids), 0.0, 1.0, 1, options=req.options)

    def changes_logits(self, sampling: Any) -> bool:
        return sampling.penalties

    def is_abort(self, output: Any) -> bool:
        return output == "abort"


class Req(SimpleNamespace):
    """SGLang's request, as far as the hooks read it."""

    def __init__(self, rid: str, prompt: int, **options: Any):
        super().__init__(
            rid=rid,
            origin_input_ids=list(range(prompt)),
            output_ids=[],
            options=options,
            spec_verify_ct=0,
            spec_num_correct_drafts=0,
            retraction_count=0,
            finished_reason=SimpleNamespace(to_json=lambda: {"type": "stop"}),
        )

    def finished(self) -> bool:
        return True

    @property
    def output_ids_through_stop(self) -> list[int]:
        return list(itertools.takewhile(lambda token: token < 900, self.output_ids))


class Server:
    """Forward steps as SGLang makes them: row p of request r holds r*100 + p in each column."""

    def __init__(self, last_width: int = 0, **policy: Any) -> None:
        self.ring, self.errors = Ring(), []
        self.hooks = RowHooks(Sglang(), K, self.errors.append, last_width)
        rules = {"enabled": True, "default": "allow", "sampling_rate": 1.0, **policy}
        self.capture = Capture(self.ring, Policy(**rules), Origin("t", "greedy", "unit"), "d", 2)
        self.hooks.start(self.capture)

    def prefill(
        self, reqs: list[Req], starts: list[int], counts: list[int], sampled: bool = True, padding: int = 0
    ) -> None:
        """``padding``: rows behind the batch's own, as other data-parallel ranks need them."""
        mode = SimpleNamespace(is_extend=lambda: True, is_idle=lambda: False)
        batch = SimpleNamespace(
            reqs=reqs, forward_mode=mode, is_extend_in_batch=True, prefix_lens=starts, extend_lens=counts
        )
        rows = [
            100 * i + s + j for i, (s, n) in enumerate(zip(starts, counts, strict=True)) for j in range(n)
        ]
        rows += [float("nan")] * padding
        hidden = torch.tensor(rows, dtype=torch.float32).view(-1, 1).expand(-1, WIDTH)
        logits = self._logits(hidden, len(reqs))

        def sample(runner: Any, logits: Any, batch: Any) -> torch.Tensor:
            logits.next_token_logits.zero_()  # as SGLang does: probabilities in place
            return torch.arange(len(reqs))

        def forward(worker: Any, batch: Any) -> Any:
            if sampled:
                self.hooks.on_sample(sample, None, logits, batch)
            batch.prefix_lens = batch.extend_lens = None  # the draft's prefill changes the batch
            return SimpleNamespace(logits_output=logits)

        self.hooks.on_forward(forward, None, batch)

    def decode(self, reqs: list[Req], lengths: list[int], accepted: list[int], k: int = 2) -> None:
        n = k + 1
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
        batch = SimpleNamespace(
            reqs=reqs,
            forward_mode=mode,
            is_extend_in_batch=False,
            seq_lens=torch.tensor(lengths),
            sampling_info=SimpleNamespace(penalties=False),
        )
        rows = [100 * i + s + j for i, s in enumerate(lengths) for j in range(n)]
        hidden = torch.tensor(rows, dtype=torch.float32).view(-1, 1).expand(-1, WIDTH)
        logits = self._logits(hidden, len(rows))
        result = (torch.zeros(len(rows), dtype=torch.int32), torch.tensor(accepted), None)

        def verify(*_: Any) -> Any:
            return result

        def forward(worker: Any, batch: Any) -> Any:
            return self.hooks.on_verify(verify, SimpleNamespace(draft_token_num=n), batch, logits)

        assert self.hooks.on_forward(forward, None, batch) is result
        for req, count in zip(reqs, accepted, strict=True):
            req.output_ids += [500 + len(req.output_ids) + i for i in range(count)]
            req.spec_verify_ct += 1

    def _logits(self, hidden: torch.Tensor, rows: int) -> Any:
        """What the logits processor gives; the last hidden state of row p of request r is -(r*100 + p)."""
        logits = SimpleNamespace(hidden_states=hidden, next_token_logits=torch.rand(rows, VOCABULARY))
        if not self.hooks.last_width:
            return logits
        states = -hidden[:, : self.hooks.last_width]
        return self.hooks.last.on_logits(lambda *_: logits, None, None, states, None, None)

    def first_token(self, *reqs: Req) -> None:
        for req in reqs:
            req.output_ids.append(500)

    def finish(self, *reqs: Req) -> None:
        self.hooks.on_output(lambda *_: None, None, list(reqs))


def _value(row: np.ndarray) -> float:
    return float(torch.from_numpy(row.view(np.int16).copy()).view(torch.bfloat16)[0])


def test_a_request_from_prompt_to_end() -> None:
    server = Server()
    a, b = Req("a", 5), Req("b", 3)
    server.prefill([a, b], [0, 0], [5, 3])
    server.first_token(a, b)
    server.decode([a, b], [5, 3], [2, 3])
    server.decode([a, b], [7, 6], [1, 1])
    server.finish(a, b)
    meta, tokens = server.ring.done["a"]
    assert tokens == [0, 1, 2, 3, 4, 500, 501, 502, 503]
    assert (meta.num_tokens, meta.verify_rounds, meta.k) == (9, 2, 2)
    assert sorted(server.ring.rows["a"]) == list(range(8)) and server.ring.teachers["a"] == [5, 6, 7]
    assert [_value(server.ring.rows["b"][p]) for p in range(7)] == [100 + p for p in range(7)]
    assert server.errors == [] and server.capture.open == {}


def test_tokens_lag_by_a_round_and_the_end_gives_the_rest() -> None:
    server = Server()
    a = Req("a", 2)
    server.prefill([a], [0], [2])
    assert server.ring.tokens["a"] == [0, 1]
    server.first_token(a)
    server.decode([a], [2], [3])
    assert server.ring.tokens["a"] == [0, 1, 500]  # what the round accepted is not read from the device
    server.decode([a], [5], [1])
    assert server.ring.tokens["a"] == [0, 1, 500, 501, 502, 503]
    server.finish(a)
    assert server.ring.done["a"][1] == [0, 1, 500, 501, 502, 503, 504]


def test_tokens_past_the_stop_are_no_part_of_the_sample() -> None:
    server = Server()
    a = Req("a", 2)
    server.prefill([a], [0], [2])
    a.output_ids = [500]
    server.decode([a], [2], [1])
    a.output_ids = [500, 900, 901]  # the stop came first
    server.decode([a], [3], [1])
    server.finish(a)
    meta, tokens = server.ring.done["a"]
    assert tokens == [0, 1, 500] and meta.num_tokens == 3


def test_chunks_and_a_cached_prefix() -> None:
    server = Server()
    a = Req("a", 9)
    server.prefill([a], [4], [3], sampled=False)  # four positions came from the cache
    assert server.ring.tokens["a"] == [0, 1, 2, 3, 4, 5, 6]
    server.prefill([a], [7], [2])
    server.first_token(a)
    server.decode([a], [9], [1])
    server.finish(a)
    assert sorted(server.ring.rows["a"]) == [4, 5, 6, 7, 8, 9]
    assert server.ring.done["a"][0].flags == ("truncated_context",)


def test_a_retracted_request_is_prefilled_with_its_response() -> None:
    server = Server()
    a, other = Req("a", 3), Req("other", 3, train="deny")
    server.prefill([other, a], [0, 0], [3, 3])
    server.first_token(a, other)
    server.decode([other, a], [3, 3], [1, 2])
    a.retraction_count = 1
    server.prefill([a], [0], [6])
    a.output_ids.append(503)
    server.decode([a], [6], [1])
    server.finish(a)
    meta, tokens = server.ring.done["a"]
    assert meta.flags == ("retracted",) and tokens == [0, 1, 2, 500, 501, 502, 503, 504]
    assert server.ring.teachers["a"] == [3, 4, 5, 6]  # 5 is the second prefill's last row
    assert "other" not in server.ring.rows


def test_last_hidden_states_are_those_of_the_teacher_rows() -> None:
    server = Server(last_width=2)
    a, other, b = Req("a", 3), Req("other", 3, train="deny"), Req("b", 4)
    server.prefill([other, a, b], [0, 0, 0], [3, 3, 4])
    server.first_token(a, other, b)
    server.decode([other, a, b], [3, 3, 4], [1, 2, 3])
    server.prefill([other, a], [3, 0], [2, 6])  # it was retracted; its last row lies in its response
    a.output_ids.append(503)
    server.decode([a], [6], [1])
    server.finish(a, b)
    assert server.errors == []
    assert {p: _value(row) for p, row in server.ring.last["a"].items()} == {3: -103, 4: -104, 5: -105, 6: -6}
    assert {p: _value(row) for p, row in server.ring.last["b"].items()} == {4: -204, 5: -205, 6: -206}


def test_a_step_whose_last_hidden_states_were_not_seen_ends_capture() -> None:
    server = Server(last_width=2)
    a = Req("a", 3)
    server.prefill([a], [0], [3])
    server.first_token(a)
    server.hooks.last.on_logits = lambda original, *rest: original()  # type: ignore[method-assign]
    server.decode([a], [3], [1])
    assert [type(error) for error in server.errors] == [NoLastHidden]


def test_changing_k() -> None:
    server = Server()
    a = Req("a", 3)
    server.prefill([a], [0], [3])
    server.first_token(a)
    for k, accepted in ((3, 4), (0, 1), (1, 2)):
        server.decode([a], [3 + len(a.output_ids) - 1], [accepted], k)
    server.finish(a)
    meta, tokens = server.ring.done["a"]
    assert meta.k == 3 and meta.flags == ("adaptive_k",)
    assert len(tokens) == 3 + 1 + 7 and sorted(server.ring.rows["a"]) == list(range(10))


def test_health_checks_and_requests_from_before_are_left_alone() -> None:
    server = Server(enabled=False)
    early, health = Req("early", 2), Req("HEALTH_1", 2)
    server.capture.policy.enabled = True
    early.output_ids = [500]  # was served while capture was off
    server.prefill([early, health], [0, 0], [3, 2])
    server.decode([early, health], [3, 2], [1, 1])
    server.finish(early, health)
    assert server.ring.names == {} and server.capture.skipped == {}


def test_aborts_close_samples_and_other_messages_do_not() -> None:
    server = Server()
    waiting, running = Req("waiting", 3), Req("running", 3)
    server.prefill([waiting, running], [0, 0], [3, 3])
    server.first_token(running)
    server.decode([running], [3], [1])
    server.hooks.on_send(lambda *_: None, None, "tokens", running)
    assert len(server.capture.open) == 2
    for req in (waiting, running):
        server.hooks.on_send(lambda *_: None, None, "abort", req)
    assert server.ring.dropped == {"aborted": 1}  # it had no response yet
    assert server.ring.done["running"][0].flags == ("aborted",)
    assert server.capture.open == {}


def test_finished_requests_are_counted_captured_or_not() -> None:
    server = Server(default="deny")
    server.hooks.watch(Live("d"))
    wanted, other = Req("a", 3, train="allow", tenant="ann"), Req("b", 2)
    health = Req("HEALTH_CHECK_1", 2)
    server.prefill([wanted, other, health], [0, 0, 0], [3, 2, 2])
    server.first_token(wanted, other, health)
    server.decode([wanted, other, health], [3, 2, 2], [3, 1, 1])
    server.hooks.draft_changed("e")
    server.finish(wanted, health)
    server.hooks.on_send(lambda *_: None, None, "abort", other)
    assert server.hooks.live is not None
    told = server.hooks.live.since(0)
    assert [(one["tenant"], one["rounds"], one["tokens"], one["reason"]) for one in told["requests"]] == [
        ("ann", 1, 4, "stop"),
        ("default", 1, 2, "abort"),
    ]
    assert all(one["straddles"] for one in told["requests"]) and told["draft"] == "e"


def test_they_are_counted_where_nothing_is_captured_at_all() -> None:
    server = Server()
    server.hooks.capture = None
    server.hooks.watch(Live("d"))
    req = Req("a", 3)
    server.prefill([req], [0], [3], sampled=False)
    server.first_token(req)
    server.hooks.on_forward(
        lambda *_: None,
        None,
        SimpleNamespace(
            reqs=[req],
            forward_mode=SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False),
            is_extend_in_batch=False,
        ),
    )
    server.finish(req)
    assert server.hooks.live is not None
    told = server.hooks.live.since(0)
    assert told["last"] == 1 and told["rounds_by_batch"] == {"1": 1}


@pytest.mark.parametrize("extends", [True, False])
def test_a_step_that_only_other_ranks_need_counts_for_nothing(extends: bool) -> None:
    """DP attention: a rank without requests steps along, and those that prefill are padded to one length."""
    server = Server()
    server.hooks.watch(Live("d"))
    req = Req("a", 3)
    server.prefill([req], [0], [3], padding=4)
    server.first_token(req)
    server.decode([req], [3], [2])
    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: True)
    idle = {
        "reqs": [],
        "forward_mode": mode,
        "is_extend_in_batch": extends,
        "prefix_lens": [],
        "extend_lens": [],
    }
    server.hooks.on_forward(
        lambda *_: server.hooks.on_verify(lambda *_: None, SimpleNamespace(draft_token_num=3), batch, None),
        None,
        batch := SimpleNamespace(**idle),
    )
    server.decode([req], [5], [1])
    server.finish(req)
    assert server.errors == [] and server.hooks.live is not None
    assert server.hooks.live.rounds_by_batch == {1: 2}
    assert {pos: _value(row) for pos, row in server.ring.rows["a"].items()} == {p: float(p) for p in range(6)}


def test_a_fault_of_the_counting_ends_the_counting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.hooks.watch(Live("d"))
    monkeypatch.setattr(Live, "prefilled", lambda *_: 1 / 0)
    req = Req("a", 3)
    server.prefill([req], [0], [3])
    server.first_token(req)
    server.decode([req], [3], [2])
    server.finish(req)
    assert server.hooks.live is None and not server.errors and "a" in server.ring.done


def test_a_fault_of_capture_is_reported_and_serving_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    a = Req("a", 3)
    monkeypatch.setattr(server.ring, "write", lambda *_: 1 / 0)
    server.prefill([a], [0], [3])
    assert [type(error) for error in server.errors] == [ZeroDivisionError]


def test_the_cost_is_counted_where_something_is_captured() -> None:
    server = Server()
    denied = Req("denied", 3, train="deny")
    server.prefill([denied], [0], [3])
    a = Req("a", 3)
    server.prefill([a], [0], [3])
    cost = server.hooks.cost
    assert cost.rounds == 2 and 0 < cost.capture_s < cost.round_s
    assert len(cost.recent) == 2 and sum(cost.recent) == pytest.approx(cost.capture_s)
