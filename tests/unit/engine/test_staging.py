"""Staged rows against direct ones: the same records in the same order, however late the copies come."""

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import hooks
from tide_platform.engine.capture import Capture, Ending, OpenSample, Origin
from tide_platform.engine.policy import Policy, Request
from tide_platform.engine.staging import StreamStager
from tide_platform.engine.staging_memory import Shape, Staging
from tide_platform.engine.steps import DirectStager, Planned, PrefillStep, Stager, VerifyStep

WIDTH, VOCABULARY, TEACHERS, LAST = 12, 256, 4, 6
SECONDS = 30


class Recorder:
    """A writer that keeps what it is given; rows are copied, as the ring does."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}
        self.calls: list[tuple[Any, ...]] = []

    def begin(self, rid: str, meta: Any) -> bool:
        self.calls.append(("begin", rid, meta.start_pos))
        return True

    def write(self, rid: str, *arguments: Any) -> bool:
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        self.calls.append(("write", rid, *copies))
        return True

    def update(self, rid: str, **changed: Any) -> None:
        self.calls.append(("update", rid, sorted(changed.items())))

    def finish(self, rid: str, meta: Any, tokens_pos: int, tokens: np.ndarray) -> bool:
        self.calls.append(("finish", rid, meta.num_tokens, meta.k, meta.flags, tokens_pos, tokens.copy()))
        return True

    def discard(self, rid: str, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.calls.append(("discard", rid, reason))


class Late:
    """A copy that is made when the test says so, and not before."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        self._pairs, self._arrived = list(pairs), threading.Event()

    def arrive(self) -> None:
        for host, staged in self._pairs:
            host.copy_(staged)
        self._arrived.set()

    def synchronize(self) -> None:
        assert self._arrived.wait(SECONDS)


class LateDevice:
    """Stands for a GPU: memory full of rubbish, copies that wait in ``waiting``."""

    def __init__(self) -> None:
        self.waiting: list[Late] = []

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 77, dtype=dtype)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(tuple(shape), 99, dtype=dtype)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
        self.waiting.append(Late(pairs))
        return self.waiting[-1]

    def arrive(self, order: random.Random | None = None) -> None:
        """All that wait, in any order."""
        arriving, self.waiting = self.waiting, []
        if order:
            order.shuffle(arriving)
        for one in arriving:
            one.arrive()


def capture_to(writer: Recorder) -> Capture:
    policy = Policy(enabled=True, default="allow", sampling_rate=1.0)
    return Capture(writer, policy, Origin("t", "target_only", "test"), "d0", 3, prompt_tail_tokens=20)


def drained(stager: StreamStager) -> None:
    done = threading.Event()
    stager.run(done.set)
    assert done.wait(SECONDS)


class Traffic:
    """Random steps of a few requests; the same ones from the same seed."""

    def __init__(self, seed: int, capture: Capture, stager: Stager, last: int = 0):
        self.last = last  # columns of the last hidden states
        self.random, self.torch = random.Random(seed), torch.Generator().manual_seed(seed)
        self.capture, self.stager = capture, stager
        self.open: list[tuple[OpenSample, int]] = []  # (sample, tokens so far)

    def _made(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.torch)

    def _stage(self, step: VerifyStep | PrefillStep) -> None:
        self.stager.stage(step)
        for value in vars(step).values():  # the engine's next step overwrites its tensors
            if isinstance(value, torch.Tensor):
                value.fill_(5)

    def _plan(self, place: int, sample: OpenSample, end: int) -> Planned:
        start, count = sample.next_token, max(0, end - sample.next_token)
        sample.next_token = start + count
        return Planned(place, sample, start, np.arange(start, start + count, dtype=np.int32))

    def prefill(self, new: int, dtype: torch.dtype, retracted: bool) -> None:
        samples = []
        for _ in range(new):
            length = self.random.randrange(3, 40)
            sample = self.capture.admit(Request(f"r{self.random.random()}", length, 0.0, 1.0, -1), 1.0)
            assert sample is not None
            self.stager.run(self.capture.begin, sample)
            samples.append((sample, length))
        if retracted and self.open:
            samples.append(self.open.pop(0))
        starts = [self.random.choice([0, 1, 2]) for _ in samples]
        counts = [length - start for (_, length), start in zip(samples, starts, strict=True)]
        offsets = [2 + sum(counts[:i]) for i in range(len(samples))]  # two rows of others before them
        answered = [len(samples) - 1] if retracted and len(samples) > new else []
        plan = [self._plan(i, sample, length) for i, (sample, length) in enumerate(samples)]
        raw = self._made(len(answered), VOCABULARY) if answered else None
        drawn = torch.randint(VOCABULARY, (len(answered),), generator=self.torch) if answered else None
        hidden = self._made(2 + sum(counts), WIDTH).to(dtype)
        last = self._made(2 + sum(counts), self.last).to(dtype) if self.last else None
        self._stage(PrefillStep(plan, hidden, starts, counts, offsets, answered, raw, drawn, last))
        self.open += samples

    def verify(self, n: int, dtype: torch.dtype, raw_planned: bool) -> None:
        """Every second place of the batch is captured."""
        batch = 2 * len(self.open)
        lengths = torch.randint(1, n + 1, (batch,), generator=self.torch)
        seq_lens = torch.zeros(batch, dtype=torch.int64)
        plan = []
        for i, (sample, length) in enumerate(self.open):
            seq_lens[2 * i + 1] = length
            plan.append(self._plan(2 * i + 1, sample, length))
            self.open[i] = (sample, length + int(lengths[2 * i + 1]))
        rows = (len(plan) if raw_planned else batch) * n
        hidden, raw = self._made(batch * n, WIDTH).to(dtype), self._made(rows, VOCABULARY)
        predict = torch.randint(VOCABULARY, (batch * n,), generator=self.torch, dtype=torch.int32)
        last = self._made(batch * n, self.last).to(dtype) if self.last else None
        self._stage(VerifyStep(plan, n, hidden, raw, raw_planned, predict, lengths, seq_lens, last))

    def end(self) -> None:
        sample, length = self.open.pop(self.random.randrange(len(self.open)))
        tail = np.arange(sample.next_token, length, dtype=np.int32)
        ending = Ending(length, sample.next_token, tail, "stop", 2.0, 1, 1, False)
        self.stager.run(self.capture.close, sample, ending)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            kind = self.random.random()
            dtype = self.random.choice([torch.float32, torch.bfloat16])
            if len(self.open) < 2 or kind < 0.3:
                self.prefill(self.random.randrange(1, 4), dtype, self.random.random() < 0.5)
            elif kind < 0.75:
                self.verify(self.random.choice([1, 2, 4]), dtype, self.random.random() < 0.5)
            else:
                self.end()
            if self.random.random() < 0.1:
                self.stager.run(self.capture.draft_changed, f"d{self.random.random()}")


def records(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Sample ids are random: numbered here in order of their first call."""
    numbers: dict[str, int] = {}
    return [(name, numbers.setdefault(rid, len(numbers)), *rest) for name, rid, *rest in calls]


def assert_same(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]]) -> None:
    assert [call[:2] for call in left] == [call[:2] for call in right]
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
            else:
                assert a == b


def kinds(writer: Recorder, sample: OpenSample | None = None) -> list[str]:
    of_sample = [c for c in writer.calls if sample is None or sample.sample_id == c[1]]
    return [call[0] for call in of_sample if call[0] != "update"]


def staged(
    writer: Recorder, slots: int = 500, rows: int = 8, last: int = 0
) -> tuple[StreamStager, LateDevice, list[Exception]]:
    device, failed = LateDevice(), []
    staging = Staging(Shape(WIDTH, TEACHERS, rows, slots, last), device)
    return StreamStager(capture_to(writer), staging, failed.append), device, failed


@pytest.mark.parametrize("last", [0, LAST])
@pytest.mark.parametrize("seed", range(4))
def test_the_records_are_those_of_the_direct_way(seed: int, last: int) -> None:
    direct, late = Recorder(), Recorder()
    capture = capture_to(direct)
    Traffic(seed, capture, DirectStager(capture, TEACHERS, last), last).run(40)

    stager, device, failed = staged(late, last=last)
    traffic, order = Traffic(seed, stager.capture, stager, last), random.Random(seed)
    for _ in range(40):  # copies arrive out of step, some after many further steps
        traffic.run(1)
        if order.random() < 0.3:
            device.arrive(order)
            drained(stager)
    device.arrive(order)
    drained(stager)
    assert not failed and late.dropped == direct.dropped and len(direct.calls) > 100
    assert_same(records(late.calls), records(direct.calls))
    widths = {call[-1].shape[1] for call in late.calls if call[0] == "write"}
    assert widths == {last}
    assert stager.capture.status()["rows"] == capture.status()["rows"]


def test_busy_slots_drop_whole_samples_and_later_ones_fit_again() -> None:
    writer = Recorder()
    stager, device, failed = staged(writer, slots=2)
    traffic = Traffic(0, stager.capture, stager)
    traffic.random.randrange = lambda low, high=None: 6  # type: ignore[method-assign]
    traffic.prefill(1, torch.float32, False)
    traffic.prefill(1, torch.float32, False)
    first, second = (sample for sample, _ in traffic.open)
    assert not first.lost and not second.lost
    traffic.prefill(1, torch.float32, False)  # both slots are on their way
    third = traffic.open[2][0]
    assert third.lost
    device.arrive()
    drained(stager)
    traffic.open.pop()
    traffic.verify(2, torch.float32, False)
    device.arrive()
    drained(stager)
    assert writer.dropped == {"staging_full": 1}
    assert stager.capture.status()["dropped"] == {"staging_full": 1}
    assert kinds(writer, third) == ["begin", "discard"]
    assert kinds(writer, first) == kinds(writer, second) == ["begin", "write", "write"]
    assert not failed


def test_nothing_is_handed_over_before_its_copy_arrived() -> None:
    writer = Recorder()
    stager, device, _ = staged(writer)
    traffic = Traffic(1, stager.capture, stager)
    traffic.prefill(1, torch.float32, False)
    traffic.prefill(1, torch.float32, False)
    first, second = device.waiting
    second.arrive()  # out of step
    assert "write" not in [call[0] for call in writer.calls]
    first.arrive()
    drained(stager)
    assert kinds(writer) == ["begin", "write", "begin", "write"]


def test_the_schedulers_thread_reads_no_device_value(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Recorder()
    stager, device, failed = staged(writer)
    traffic = Traffic(2, stager.capture, stager)
    traffic.prefill(3, torch.bfloat16, False)
    here, stage = threading.current_thread(), stager.stage

    def forbid(name: str) -> None:
        stock = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            assert threading.current_thread() is not here, f"Tensor.{name} on the scheduler's thread"
            return stock(tensor, *arguments, **named)

        patches.setattr(torch.Tensor, name, read)

    for n in (1, 3):
        with monkeypatch.context() as patches:

            def watched(step: VerifyStep | PrefillStep) -> None:
                for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero"):
                    forbid(name)
                stage(step)

            patches.setattr(stager, "stage", watched)
            traffic.verify(n, torch.bfloat16, False)
    device.arrive()
    drained(stager)
    assert not failed and [call[0] for call in writer.calls].count("write") == 9


def test_a_fault_on_the_other_thread_is_told_and_the_queue_goes_on() -> None:
    stager, _, failed = staged(Recorder())

    def broken() -> None:
        raise OSError("ring gone")

    stager.run(broken)
    drained(stager)
    assert [str(error) for error in failed] == ["ring gone"]


def test_the_shape_holds_a_whole_prefill_and_four_rounds() -> None:
    shape = Shape.of(width=3 * 4096, teacher_k=64, prefill_tokens=8192, running=256, k=3)
    assert shape.rows * shape.slots >= 8192 + 4 * 256 * 4
    assert shape.bytes < 400 << 20


def engine_config(folder: Path, device: str) -> EngineConfig:
    return EngineConfig(
        deployment="unit",
        device=device,
        target_digest="t",
        hidden_size=8,
        vocab_size=32,
        aux_layer_ids=[1, 2, 3],
        draft_digest="d",
        drafts_root=folder,
        capture_enabled=True,
        capture_default="allow",
        sampling_rate=1.0,
        teacher_k=4,
        ring_path=folder / "ring",
        ring_bytes=1 << 20,
    )


@pytest.mark.parametrize(("device", "rank", "made"), [("cuda", 0, 1), ("cuda", 1, 0), ("cpu", 0, 0)])
def test_the_writing_rank_of_a_gpu_takes_its_memory_before_the_kv_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, rank: int, made: int
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(hooks, "make_staging", lambda shape: events.append(shape) or "staging")
    args = SimpleNamespace(
        chunked_prefill_size=-1,
        max_prefill_tokens=4096,
        speculative_num_draft_tokens=4,
        max_running_requests=32,
    )
    sglang = SimpleNamespace(arguments=lambda args: args, writes=lambda runner: rank == 0)
    ours = hooks.Hooks(engine_config(tmp_path, device), sglang, lambda: [])  # type: ignore[arg-type]
    runner = SimpleNamespace(server_args=args)
    for role in ("target", "draft"):
        assert ours.on_memory_pool(lambda runner: events.append("KV cache") or "made", runner) == "made", role
    assert [event for event in events if event == "KV cache"] == ["KV cache"] * 2
    shapes = [event for event in events if event != "KV cache"]
    assert len(shapes) == made
    if made:
        assert events[0] == shapes[0] and shapes[0].rows * shapes[0].slots >= 4096 + 4 * 32 * 4
