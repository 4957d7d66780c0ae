"""Samples on their way: read ahead, in order, from the store as from memory; damage counted and named."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import bf16_bits, make_meta, random_draft, random_sample

from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import Settings
from tide_platform.config.schema import Training
from tide_platform.draft.prefix import fill_prefixes
from tide_platform.draft.vocab import inverse_map
from tide_platform.store import reading
from tide_platform.store.errors import BlobCorrupt, StoreUnavailable
from tide_platform.store.hidden_states import HiddenStates, open_store
from tide_platform.training.data import Example, NothingToTrain, prepare_all
from tide_platform.training.draw import drawn
from tide_platform.training.loader import FetchBroke, Loader, TooManyDamaged, example_bytes, feeding
from tide_platform.training.plan import Expected, PlannedStep, expected, plan_run
from tide_platform.training.samples import MemorySamples, StoredSamples
from tide_platform.training.teacher import Teacher
from tide_platform.training.trainer import fit

RECIPE = Training(threads=1, epochs=1, batch_size=2)
STREAM = StreamMeta("t", 8, 20, (1, 2, 3), 4)


def inverse() -> np.ndarray:
    draft, _ = random_draft(0, draft_vocab=18)
    return inverse_map(draft.d2t.numpy(), 20)


def some(count: int, **changes: object) -> list[Sample]:
    rng = np.random.default_rng(1)
    made = [random_sample(rng, f"s{i}", 12 + i, 4, 0, 0.0) for i in range(count)]
    return [Sample(replace(s.meta, **changes), s.tensors) for s in made]  # type: ignore[arg-type]


def poisoned(sample: Sample) -> Sample:
    aux = sample.tensors["aux"].copy()
    aux[3, 0] = 0x7FC0  # NaN
    return Sample(sample.meta, sample.tensors | {"aux": aux})


def stored(root: Path, samples: list[Sample]) -> HiddenStates:
    store = open_store(Settings.model_validate({"storage": {"uri": str(root)}}))
    store.ensure(STREAM)
    store.append(samples, ["segment"])
    return store


def equal(a: Example | Teacher, b: Example | Teacher) -> bool:
    for name, value in vars(a).items():
        other = vars(b)[name]
        if isinstance(value, torch.Tensor):
            if not torch.equal(value, other):
                return False
        elif name == "supervised":
            if not all((x == y).all() for x, y in zip(value, other, strict=True)):
                return False
        elif name == "teacher":
            if not equal(value, other):
                return False
        elif value != other:
            return False
    return True


def test_the_store_gives_what_memory_gives(tmp_path: Path) -> None:
    samples = some(7)
    from_store = StoredSamples(store := stored(tmp_path, samples), store.refs(), store.tip().version)
    pool = [5, 1, 0, 6]
    loaders = [Loader(each, pool, inverse(), RECIPE) for each in (MemorySamples(samples), from_store)]
    for chosen in ([2, 0], [1, 3, 0]):  # the second from the cache, in part
        memory, store_ = (loader(chosen) for loader in loaders)
        assert [e.sample_id for e in memory] == [f"s{pool[i]}" for i in chosen]
        assert all(equal(a, b) for a, b in zip(memory, store_, strict=True))
    tokens = list(from_store.tokens([6, 0]))
    assert (tokens[0] == samples[6].tensors["input_ids"]).all() and len(tokens) == 2


def test_holes_are_filled_from_donors_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As :func:`fill_prefixes` over all samples would, but with one donor read."""
    samples = some(8)
    shared = samples[0]
    for i in (3, 5):  # the first 6 tokens and rows are those of sample 0; these two computed none of them
        tensors = {name: array.copy() for name, array in samples[i].tensors.items()}
        tensors["input_ids"][:6] = shared.tensors["input_ids"][:6]
        tensors["row_pos"], tensors["aux"] = tensors["row_pos"][6:], tensors["aux"][6:]
        samples[i] = Sample(replace(samples[i].meta, flags=("truncated_context",)), tensors)
    wanted = fill_prefixes(samples)
    assert len(wanted[3].tensors["row_pos"]) == samples[3].meta.num_tokens
    store = stored(tmp_path, samples)
    reads: list[str] = []
    load = reading.load_batch

    def counting(handle, dataset, pairs, packed=False):  # type: ignore[no-untyped-def]
        reads.extend(name for name, _ in pairs)
        return load(handle, dataset, pairs, packed)

    monkeypatch.setattr(reading, "load_batch", counting)
    source = StoredSamples(store, store.refs())
    assert reads == []
    found = source.load([3, 5, 7])
    assert reads == ["s3", "s5", "s7", "s0"]
    for i, item in zip((3, 5, 7), found, strict=True):
        assert isinstance(item, Sample)
        assert (item.tensors["row_pos"] == wanted[i].tensors["row_pos"]).all()
        assert (item.tensors["aux"] == wanted[i].tensors["aux"]).all()


def test_rows_of_another_tenant_fill_nothing(tmp_path: Path) -> None:
    whole, short = some(2)
    tensors = {name: array.copy() for name, array in short.tensors.items()}
    tensors["input_ids"][:6] = whole.tensors["input_ids"][:6]
    tensors["row_pos"], tensors["aux"] = tensors["row_pos"][6:], tensors["aux"][6:]
    short = Sample(replace(short.meta, flags=("truncated_context",), tenant="other"), tensors)
    store = stored(tmp_path, [whole, short])
    (item,) = StoredSamples(store, store.refs()).load([1])
    assert isinstance(item, Sample) and item.tensors["row_pos"][0] == 6


def test_one_poisoned_sample_among_many_is_left_out_by_name() -> None:
    samples = some(12)
    samples[4] = poisoned(samples[4])
    loader = Loader(MemorySamples(samples), range(12), inverse(), RECIPE)
    assert [e.sample_id for e in loader([3, 4, 5])] == ["s3", "s5"]
    assert loader.skipped == {"s4": "aux states are not finite"}
    assert loader([4]) == []


def test_a_damaged_blob_costs_its_own_sample_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path, some(12))
    load = reading.load_batch

    def damaged(handle, dataset, pairs, packed=False):  # type: ignore[no-untyped-def]
        for sample in load(handle, dataset, pairs, packed):
            if sample.meta.sample_id == "s4":
                raise BlobCorrupt(handle.uri, "s4", "aux")
            yield sample

    monkeypatch.setattr(reading, "load_batch", damaged)
    loader = Loader(StoredSamples(store, store.refs()), range(12), inverse(), RECIPE)
    assert [e.sample_id for e in loader([3, 4, 5])] == ["s3", "s5"]
    assert loader.skipped == {"s4": "damaged in storage (aux)"}


@pytest.mark.parametrize("damage", ["flipped", "torn", "gone"])
def test_a_blob_damaged_on_disk_is_left_out_and_its_neighbours_are_read(tmp_path: Path, damage: str) -> None:
    big = random_sample(np.random.default_rng(2), "big", 3000, 4, 0, 0.0)  # beyond what Lance keeps inline
    store = stored(tmp_path, [*some(11), big])
    (path, *_) = sorted(tmp_path.rglob("*.blob"), key=lambda each: -each.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    loader = Loader(StoredSamples(store, store.refs()), range(12), inverse(), RECIPE)
    assert [e.sample_id for e in loader([0, 11, 5])] == ["s0", "s5"]
    assert list(loader.skipped) == ["big"] and loader.skipped["big"].startswith("damaged in storage (")


def test_too_much_damage_ends_it_by_name() -> None:
    samples = [poisoned(s) if i in (1, 2, 3) else s for i, s in enumerate(some(20))]
    loader = Loader(MemorySamples(samples), range(20), inverse(), RECIPE)
    assert len(loader([0, 1, 2])) == 1  # 2 of 20: allowed
    with pytest.raises(TooManyDamaged, match=r"3 of 20 .*3 x aux states are not finite.*s1: aux"):
        loader([3, 4])


def test_of_several_processes_none_judges_alone() -> None:
    samples = [poisoned(s) if i in (1, 2, 3) else s for i, s in enumerate(some(20))]
    loader = Loader(MemorySamples(samples), range(20), inverse(), RECIPE, processes=2)
    assert [e.sample_id for e in loader([0, 1, 2, 3])] == ["s0"]
    with pytest.raises(TooManyDamaged, match="4 of 20"):
        loader.judge(loader.skipped | {"s17": "of another process"})


def test_examples_are_kept_as_far_as_memory_is_given(tmp_path: Path) -> None:
    samples = some(6)
    examples, _ = prepare_all(samples, inverse(), 3, 100)
    room = example_bytes(examples[0]) + example_bytes(examples[1]) + 10

    asked: list[int] = []

    class Counting(MemorySamples):
        def load(self, chosen):  # type: ignore[no-untyped-def]
            asked.extend(chosen)
            return super().load(chosen)

    loader = Loader(Counting(samples), range(6), inverse(), RECIPE.model_copy(update={"cache_bytes": room}))
    for _ in range(2):
        loader([0, 1, 2])
        loader([3, 4, 5])
    assert asked == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]


class Panic(BaseException):
    """As pyo3's, which a fault in Lance becomes."""


def steps(count: int) -> list[PlannedStep]:
    return [PlannedStep(0, i == count - 1, (i,)) for i in range(count)]


def test_reading_goes_on_while_a_step_computes_and_no_further_than_allowed() -> None:
    fetched: list[int] = []
    main = threading.get_ident()

    def fetch(chosen):  # type: ignore[no-untyped-def]
        assert threading.get_ident() != main
        fetched.extend(chosen)
        return []

    with feeding(fetch, steps(9), 2, lambda: False) as feed:
        assert feed.next() == []
        time.sleep(0.2)
        assert len(fetched) == 4  # one taken, two wait, one in hand
        for _ in range(8):
            assert feed.next() is not None
    assert fetched == list(range(9))
    assert not [t for t in threading.enumerate() if t.name == "samples"]


def test_the_thread_ends_with_the_block_and_its_error_arrives() -> None:
    with feeding(lambda chosen: [], steps(99), 1, lambda: False) as feed:
        feed.next()
    assert not [t for t in threading.enumerate() if t.name == "samples"]

    def fail(chosen):  # type: ignore[no-untyped-def]
        raise StoreUnavailable("s3://x", "it is down")

    with feeding(fail, steps(2), 1, lambda: False) as feed, pytest.raises(StoreUnavailable):
        feed.next()

    def panic(chosen):  # type: ignore[no-untyped-def]
        raise Panic("index out of bounds")

    with feeding(panic, steps(2), 1, lambda: False) as feed, pytest.raises(FetchBroke, match="Panic: index"):
        feed.next()
    asked, answer = threading.Event(), threading.Event()

    def hang(chosen):  # type: ignore[no-untyped-def]
        answer.wait(9)
        return []

    with feeding(hang, steps(2), 1, asked.is_set) as feed:
        threading.Timer(0.1, asked.set).start()
        assert feed.next() is None  # a store that does not answer keeps nobody from ending
        answer.set()


def test_an_epoch_of_nothing_usable_is_named() -> None:
    draft, embed = random_draft(0, draft_vocab=18)
    samples = some(4)
    recipe = RECIPE.model_copy(update={"max_damaged_share": 1})
    nowhere = np.full(20, -1)  # no token is in the draft's vocabulary
    loader = Loader(MemorySamples(samples), range(4), nowhere, recipe)
    sized = [e for s in samples if isinstance(e := expected(s.meta, 3, 100), Expected)]
    plan = plan_run(sized, [range(4)] * 3, 2, 0)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    with pytest.raises(NothingToTrain, match="4 x no supervised position"):
        fit(draft, embed, plan, loader, recipe, 0, skipped=loader.skipped)
    assert all(torch.equal(before[name], tensor) for name, tensor in draft.state_dict().items())


def test_a_step_of_which_nothing_is_left_updates_nothing() -> None:
    draft, embed = random_draft(0, draft_vocab=18)
    samples = some(4)
    examples, _ = prepare_all(samples, inverse(), 3, 100)
    plan = plan_run(examples, [range(4)], 2, 0)
    empty = set(plan.steps[1].samples)
    seen = []

    def fetch(chosen):  # type: ignore[no-untyped-def]
        return [] if set(chosen) == empty else [examples[i] for i in chosen]

    records = fit(
        draft, embed, plan, fetch, RECIPE, 0,
        on_step=lambda r: seen.append({n: t.clone() for n, t in draft.state_dict().items()}),
    )  # fmt: skip
    assert [(r.samples, r.loss > 0) for r in records] == [(2, True), (0, False)]
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in seen[1].items())


def one(tokens: int, prompt: int, start: int = 0) -> Sample:
    rows = np.arange(start, start + tokens, dtype=np.int32)
    teacher = rows[rows >= prompt - 1]
    tensors = {
        "input_ids": np.zeros(tokens, np.int32),
        "row_pos": rows,
        "aux": bf16_bits(torch.ones(tokens, 24)),
        "teacher_pos": teacher,
        "teacher_ids": np.tile(np.array([1, 2], np.int32), (len(teacher), 1)),
        "teacher_logp": np.tile(np.array([-0.5, -1.0], np.float16), (len(teacher), 1)),
        "token_logp": np.zeros(len(teacher), np.float16),
    }
    return Sample(make_meta("one", tokens, prompt, start), tensors)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5), st.integers(1, 4), st.integers(3, 30))
def test_metadata_promise_what_the_tensors_hold(
    tokens: int, prompt: int, start: int, unroll: int, longest: int
) -> None:
    """Of a sample without holes; so nothing is left out before it is read that could teach something."""
    sample = one(tokens, min(prompt, start + tokens), start)
    promised = expected(sample.meta, unroll, longest)
    try:
        (example,), _ = prepare_all([sample], np.arange(20), unroll, longest)
    except NothingToTrain:
        assert isinstance(promised, str)
        return
    assert promised == Expected("one", example.context, example.roots)


def test_a_prompt_longer_than_what_is_used_is_named() -> None:
    assert expected(make_meta("a", 50, 30), 3, 20) == "its response begins behind training.max_length"
    assert expected(make_meta("a", 31, 30), 3, 99) == "response of less than two tokens"


@given(st.integers(1, 60), st.integers(0, 70), st.integers(0, 9))
def test_epochs_walk_through_the_whole_pool_before_anything_comes_again(
    size: int, share: int, seed: int
) -> None:
    pool = [f"r{i}" for i in range(size)]
    epochs = [drawn(reversed(pool), share, epoch, seed, "reference") for epoch in range(4)]
    assert epochs == [drawn(pool, share, epoch, seed, "reference") for epoch in range(4)]
    assert all(len(set(e)) == len(e) == min(share, size) and set(e) <= set(pool) for e in epochs)
    seen = [name for e in epochs for name in e]
    assert len(set(seen)) == min(size, max(len(seen), 0) if share < size else size)


def test_a_plan_is_known_by_its_order() -> None:
    pool = [Expected(f"s{i}", 10 + i, 5) for i in range(9)]
    orders = [(range(9), 1, 0), (range(9), 1, 1), ([*range(1, 9), 0], 1, 0), (range(9), 2, 0)]
    digests = [plan_run(pool, [order] * 2, size, seed).digest for order, size, seed in orders]
    assert len(set(digests)) == 4
    plan = plan_run(pool, [range(9), [0, 3, 5]], 2, 0)
    assert sorted(i for s in plan.steps if s.epoch == 1 for i in s.samples) == [0, 3, 5]
    assert [s.epoch for s in plan.steps if s.last_of_epoch] == [0, 1]
