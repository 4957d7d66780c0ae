"""Samples of a file's own answers: the rows that capture has, each stored once, nothing not finite."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_targets import TINY, conversation, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tiny import AUX_LAYERS, forward
from tiny import prompts as tiny_prompts

from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import Settings, target_digest
from tide_platform.corpus import append
from tide_platform.corpus.append import append_new
from tide_platform.corpus.errors import StatesNotFinite
from tide_platform.corpus.features import Answer, FeatureCounts, FeaturePlan, batches, build_features, pools
from tide_platform.corpus.prepare import PreparePlan, prepare
from tide_platform.corpus.prepared import read_header
from tide_platform.corpus.stream import stream_for
from tide_platform.draft.target_model import TargetModel
from tide_platform.store.errors import StreamMismatch
from tide_platform.store.hidden_states import HiddenStates, open_store

K = 8
PLAN = FeaturePlan("file", batch_tokens=200, pool_bytes=1 << 20, aux_format="bf16", validation_share=0.15)


def settings_of(tmp_path: Path) -> Settings:
    settings = Settings(target=TINY, state=tmp_path / "state")
    settings.storage.uri = str(tmp_path / "store")
    settings.capture.teacher_k = K
    return settings


def texts(count: int) -> list[str]:
    return [bytes(row.tolist()).decode() for row in tiny_prompts(count, 48, seed=4)]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Ten conversations, one of them of two answers."""
    records = [conversation(text[: 20 + i], text[20 + i :]) for i, text in enumerate(texts(9))]
    records.append(conversation("Return a copy", "of the list.", "And", "sort it."))
    source = write_jsonl(tmp_path / "in.jsonl", records)
    prepare(source, tmp_path / "p.jsonl", TINY, PreparePlan(None, "all", 256, 0))
    return tmp_path / "p.jsonl"


def run(
    tmp_path: Path, prepared: Path, plan: FeaturePlan = PLAN, target: TargetModel | None = None
) -> tuple[FeatureCounts, HiddenStates]:
    settings = settings_of(tmp_path)
    store = open_store(settings)
    stream = stream_for(settings, store, TINY, target_digest(TINY))
    counts = build_features(
        prepared,
        read_header(prepared),
        store,
        stream,
        lambda: target or TargetModel(TINY, stream.aux_layer_ids),
        frozenset({0}),
        plan,
    )
    return counts, store


def test_rows_and_values_are_the_targets(tmp_path: Path, prepared: Path):
    counts, store = run(tmp_path, prepared)
    samples = list(store.load(store.refs()))
    assert (counts.answers, counts.appended, len(samples)) == (11, 11, 11)
    assert store.stream_meta().aux_layer_ids == AUX_LAYERS
    for sample in samples:
        assert_truth(sample)
    assert {sample.meta.tenant for sample in samples} == {"file"}


def assert_truth(sample: Sample) -> None:
    tensors, end, start = sample.tensors, sample.meta.num_tokens, sample.meta.prompt_tokens
    assert tensors["row_pos"].tolist() == list(range(end - 1))
    assert tensors["teacher_pos"].tolist() == list(range(start, end - 1))
    ids = torch.from_numpy(tensors["input_ids"].astype(np.int64))[None]
    logits, aux = forward(ids)
    found = torch.from_numpy(tensors["aux"].view(np.int16).copy()).view(torch.bfloat16)
    torch.testing.assert_close(found, aux[0, : end - 1], rtol=2**-7, atol=1e-2)
    logp = torch.log_softmax(logits[0, start : end - 1], -1).numpy()
    expected = -np.sort(-logp, axis=1)[:, :K]
    np.testing.assert_allclose(tensors["teacher_logp"], expected, atol=1e-2, rtol=2e-3)
    at_ids = np.take_along_axis(logp, tensors["teacher_ids"], 1)
    np.testing.assert_allclose(tensors["teacher_logp"], at_ids, atol=1e-2, rtol=2e-3)
    emitted = logp[np.arange(len(logp)), tensors["input_ids"][start + 1 :]]
    np.testing.assert_allclose(tensors["token_logp"], emitted, atol=1e-2, rtol=2e-3)


def test_a_conversation_of_two_answers_is_two_samples_of_one_request(tmp_path: Path, prepared: Path):
    _, store = run(tmp_path, prepared)
    by_request: dict[str, list[Sample]] = {}
    for sample in store.load(store.refs()):
        by_request.setdefault(sample.meta.request_id, []).append(sample)
    (pair,) = [samples for samples in by_request.values() if len(samples) == 2]
    first, second = sorted(pair, key=lambda sample: sample.meta.num_tokens)
    said = [bytes(s.tensors["input_ids"][s.meta.prompt_tokens :].tolist()) for s in (first, second)]
    assert said == [b"of the list.\n", b"sort it.\n"]
    ids = second.tensors["input_ids"]
    assert ids[: first.meta.num_tokens].tolist() == first.tensors["input_ids"].tolist()


def test_a_second_run_appends_nothing_and_loads_no_target(tmp_path: Path, prepared: Path):
    run(tmp_path, prepared)

    def never() -> TargetModel:
        raise AssertionError("the target was loaded")

    settings = settings_of(tmp_path)
    store = open_store(settings)
    version = store.tip().version
    stream = stream_for(settings, store, TINY, target_digest(TINY))
    counts = build_features(prepared, read_header(prepared), store, stream, never, frozenset({0}), PLAN)
    assert (counts.appended, counts.known) == (0, 11)
    assert store.tip().version == version and store.tip().rows == 11


def test_the_same_file_under_another_tenant_is_stored_too(tmp_path: Path, prepared: Path):
    run(tmp_path, prepared)
    counts, store = run(tmp_path, prepared, replace(PLAN, tenant="other"))
    assert counts.appended == 11 and store.tip().rows == 22


def test_small_batches_and_pools_give_the_same_samples(tmp_path: Path, prepared: Path):
    _, large = run(tmp_path / "a", prepared, replace(PLAN, batch_tokens=4096))
    counts, small = run(tmp_path / "b", prepared, replace(PLAN, batch_tokens=1, pool_bytes=100_000))
    assert counts.appended == 11 and small.tip().version >= large.tip().version + 3
    by_id = {sample.meta.sample_id: sample for sample in large.load(large.refs())}
    for sample in small.load(small.refs()):
        other = by_id.pop(sample.meta.sample_id)
        assert other.meta == sample.meta
        np.testing.assert_allclose(
            sample.tensors["teacher_logp"], other.tensors["teacher_logp"], atol=1e-2, rtol=2e-3
        )
    assert not by_id


def test_the_same_samples_from_two_writers_at_once_are_stored_once(
    tmp_path: Path, prepared: Path, monkeypatch
):
    _, source = run(tmp_path / "a", prepared)
    samples = list(source.load(source.refs()))
    settings = settings_of(tmp_path / "b")
    ours, theirs = open_store(settings), open_store(settings)
    ours.ensure(source.stream_meta())
    real, raced = append.stored_ids, []

    def between(store: HiddenStates, ids: list[str], version: int | None = None) -> set[str]:
        known = real(store, ids, version)
        if store is ours and not raced:  # the other one commits after this one has looked
            raced.append(append_new(theirs, samples[:7]))
        return known

    monkeypatch.setattr(append, "stored_ids", between)
    assert append_new(ours, samples) == 4 and raced == [7]
    assert ours.tip().rows == 11 and len({ref.sample_id for ref in ours.refs()}) == 11


def test_states_are_packed_as_the_spool_packs_them(tmp_path: Path, prepared: Path):
    _, store = run(tmp_path, prepared, replace(PLAN, aux_format="int4", validation_share=0.5))
    formats = {ref.request_id: ref.aux_format for ref in store.refs()}
    assert set(formats.values()) == {"int4", "bf16"}
    _, reference = run(tmp_path, prepared, replace(PLAN, aux_format="int4", tenant="reference"))
    assert {r.aux_format for r in reference.refs(where="tenant = 'reference'")} == {"bf16"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_named_and_nothing_is_stored(
    tmp_path: Path, prepared: Path, bad: float
):
    target = TargetModel(TINY, AUX_LAYERS)
    with torch.no_grad():
        target.model.get_decoder().layers[1].mlp.down_proj.weight[0, 0] = bad
    with pytest.raises(StatesNotFinite, match=r"aux states at position 0 is not finite.*--dtype") as caught:
        run(tmp_path, prepared, target=target)
    assert caught.value.position == 0
    assert open_store(settings_of(tmp_path)).tip().rows == 0


def test_logits_that_are_not_finite_are_named(tmp_path: Path, prepared: Path):
    target = TargetModel(TINY, AUX_LAYERS)
    norm = target.model.get_decoder().norm
    norm.register_forward_hook(
        lambda _module, _args, output: output.masked_fill(torch.ones_like(output) > 0, torch.inf)
    )
    with pytest.raises(StatesNotFinite, match="last hidden states"):
        run(tmp_path, prepared, target=target)


def test_a_dataset_of_another_target_refuses_before_the_target_is_loaded(tmp_path: Path, prepared: Path):
    settings = settings_of(tmp_path)
    store = open_store(settings)
    store.ensure(StreamMeta("another", 96, 256, AUX_LAYERS, K))
    stream = stream_for(settings, store, TINY, target_digest(TINY))
    with pytest.raises(StreamMismatch):
        build_features(prepared, read_header(prepared), store, stream, lambda: 1 / 0, frozenset(), PLAN)  # type: ignore[arg-type,return-value]


def test_layers_and_k_are_those_of_the_dataset(tmp_path: Path):
    settings = settings_of(tmp_path)
    store = open_store(settings)
    assert stream_for(settings, store, TINY, "d") == StreamMeta("d", 96, 256, (1, 2, 3), K)
    store.ensure(StreamMeta("d", 96, 256, (0, 1, 2), 3))
    assert stream_for(settings, store, TINY, "d") == StreamMeta("d", 96, 256, (0, 1, 2), 3)


def test_answers_that_teach_no_step_are_counted(tmp_path: Path):
    records = [
        {"input_ids": [65, 66], "loss_mask": [0, 1]},
        {"input_ids": [65, 66, 67], "loss_mask": [1, 1, 1]},
    ]
    records.append({"input_ids": [65, 66, 67], "loss_mask": [0, 1, 1]})
    prepare(
        write_jsonl(tmp_path / "in.jsonl", records),
        tmp_path / "p.jsonl",
        TINY,
        PreparePlan(None, "all", 9, 0),
    )
    counts, store = run(tmp_path, tmp_path / "p.jsonl")
    assert (counts.answers, counts.too_short, counts.appended) == (3, 2, 1) and store.tip().rows == 1


def answers(lengths: list[int]) -> list[Answer]:
    return [Answer(str(i), "r", np.zeros(length, np.int64), 1) for i, length in enumerate(lengths)]


@given(lengths=st.lists(st.integers(1, 50), max_size=30), limit=st.integers(1, 200))
def test_pools_and_batches_are_bounded_and_lose_nothing(lengths: list[int], limit: int):
    given_answers = answers(lengths)
    found = list(pools(iter(given_answers), limit, 1))
    assert [a for pool in found for a in pool] == given_answers
    assert all(len(pool) == 1 or sum(len(a.input_ids) for a in pool) <= limit for pool in found)
    batched = list(batches(given_answers, limit))
    assert sorted(a.sample_id for b in batched for a in b) == sorted(a.sample_id for a in given_answers)
    assert all(len(b) == 1 or len(b) * max(len(a.input_ids) for a in b) <= limit for b in batched)
