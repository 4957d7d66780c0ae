"""The Lance dataset, on a local folder."""

import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.synthetic import LAST_STREAM, STREAM, assert_same, make_sample
from tide_platform.capture.packing import pack, unpack
from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings
from tide_platform.store import durable
from tide_platform.store.errors import (
    BlobCorrupt,
    CommitRaced,
    NoDataset,
    SamplesMissing,
    StoreUnavailable,
    StreamMismatch,
)
from tide_platform.store.hidden_states import Tip, open_store
from tide_platform.store.lance_features import LanceFeatureStore

SAMPLES = [make_sample(f"s{number}", 5 + number, seed=number, flags=("grammar",)) for number in range(6)]


@pytest.fixture
def settings(tmp_path):
    return Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path)


@pytest.fixture
def store(settings):
    store = open_store(settings)
    store.ensure(STREAM)
    return store


def test_before_the_first_sample(settings):
    store = open_store(settings)
    assert store.tip() == Tip(0, 0)
    assert store.refs() == [] and store.committed_segments() == set() and store.sample_ids() == set()
    with pytest.raises(NoDataset, match="first captured sample"):
        store.stream_meta()
    with pytest.raises(NoDataset):
        list(store.load(["x"]))


def files_of(store):
    return {path for path in Path(store.handle.folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("rebased", [False, True])
def test_whatever_a_commit_writes_is_synced(store, settings, monkeypatch, rebased):
    """A power cut cannot be made here: that each new file and its folder were synced stands for it."""
    store.append(SAMPLES[:1], ["first"])
    there, snapshot = files_of(store), store.snapshot()
    if rebased:  # onto a version that does not touch the fence
        store.handle.require(fresh=True).update_config({"note": "of upkeep"})
        there = files_of(store)
    synced: set[Path] = set()
    monkeypatch.setattr(durable, "sync", lambda path: synced.add(Path(path)))
    large = make_sample("large", 4000)  # its blobs are files of their own
    version = store.commit(store.write([large]), ["second"], snapshot).version
    assert version == snapshot.version + 1 + rebased
    new = files_of(store) - there
    assert {path.suffix for path in new} == {".lance", ".blob", ".txn", ".manifest"}
    assert new <= synced and {path.parent for path in new} <= synced


def test_a_sample_comes_out_as_it_went_in_and_in_the_order_asked_for(store):
    store.append(SAMPLES, ["seg"])
    refs = store.refs()
    assert [ref.sample_id for ref in refs] == [sample.meta.sample_id for sample in SAMPLES]
    assert all(
        getattr(ref, name) == value
        for ref, s in zip(refs, SAMPLES, strict=True)
        for name, value in vars(s.meta).items()
    )
    order = [3, 0, 5, 3, 1]
    for wanted in ([refs[i] for i in order], [refs[i].sample_id for i in order]):
        found = list(store.load(wanted, batch=2))
        for sample, i in zip(found, order, strict=True):
            assert_same(sample, SAMPLES[i])


def test_empty_teacher_and_single_row(store):
    sample = make_sample("bare", 1)
    empty = {
        name: sample.tensors[name][:0]
        for name in ("teacher_pos", "teacher_ids", "teacher_logp", "token_logp")
    }
    sample = replace(sample, tensors=sample.tensors | empty)
    store.append([SAMPLES[0], sample], ["seg"])
    assert_same(next(iter(store.load(["bare"]))), sample)


def test_an_append_is_one_version_and_a_fragment_each_tenant_and_day(store):
    version = store.tip().version
    mixed = [
        make_sample("a"),
        make_sample("b", tenant="other"),
        make_sample("c", captured_at=1.8e9 + 86400),
        make_sample("d"),
    ]
    tip = store.append(mixed, ["x", "y"])
    assert tip == Tip(version + 1, 4) == store.tip()
    assert sorted(fragment.count_rows() for fragment in store.handle.require().get_fragments()) == [1, 1, 2]
    assert store.committed_segments() == {"x", "y"}
    assert [ref.sample_id for ref in store.refs(where="tenant = 'other'")] == ["b"]


def test_a_version_stays_what_it_was(store):
    first = store.append(SAMPLES[:2], ["1"])
    second = store.append(SAMPLES[2:], ["2"])
    assert len(store.refs(first.version)) == 2 and len(store.refs(second.version)) == 6
    assert [ref.sample_id for ref in store.refs(where=f"_row_created_at_version > {first.version}")] == [
        sample.meta.sample_id for sample in SAMPLES[2:]
    ]
    with pytest.raises(SamplesMissing, match="s5"):
        list(store.load(["s5"], version=first.version))


def test_two_handles_see_each_other(store, settings):
    other = open_store(settings)
    other.ensure(STREAM)
    assert other.tip().rows == 0
    store.append(SAMPLES[:1], ["1"])
    assert other.tip().rows == 1
    other.append(SAMPLES[1:2], ["2"])
    assert store.tip().rows == 2 and store.committed_segments() == {"1", "2"}


def test_another_stream_is_refused_by_name(store, settings):
    for changed, name in (
        (replace(STREAM, aux_layer_ids=(1, 2, 3)), "aux_layer_ids"),
        (replace(STREAM, target_digest="other"), "target_digest"),
        (replace(STREAM, format_version=9), "format_version"),
        (LAST_STREAM, "target_signal topk against last_hidden .* set capture.target_signal: topk"),
    ):
        with pytest.raises(StreamMismatch, match=name):
            open_store(settings).ensure(changed)
    with pytest.raises(StreamMismatch, match="target_digest"):
        store.append([make_sample("x", target_digest="other")], ["1"])
    assert store.tip().rows == 0 and store.stream_meta() == STREAM


def test_last_hidden_states_are_a_blob_of_their_own(settings):
    store = open_store(settings)
    store.ensure(LAST_STREAM)
    samples = [
        make_sample("small", 12, 1, LAST_STREAM),
        pack(make_sample("big", 3000, 2, LAST_STREAM), "int8"),
    ]
    store.append(samples, ["1"])
    small, big = open_store(settings).load(["small", "big"])
    assert_same(small, samples[0])
    np.testing.assert_array_equal(big.tensors["last_hidden"], samples[1].tensors["last_hidden"])
    with pytest.raises(StreamMismatch, match="target_signal last_hidden against topk"):
        store.append([make_sample("x")], ["2"])
    wide = make_sample("wide", 12, 1, replace(LAST_STREAM, hidden_size=16))
    wide.tensors["aux"] = wide.tensors["aux"][:, :24]
    with pytest.raises(StreamMismatch, match="hidden_size 8 against 16"):
        store.append([wide], ["2"])
    assert store.tip().rows == 2


def test_a_dataset_without_them_refuses_samples_with_them(store):
    with pytest.raises(StreamMismatch, match="target_signal topk against last_hidden"):
        store.append([make_sample("x", 12, 1, LAST_STREAM)], ["1"])


def test_a_dataset_of_a_former_release_is_read(settings, monkeypatch):
    """Its schema says nothing of a target signal."""

    def former(stream):
        return {name: value for name, value in asdict(stream).items() if name != "target_signal"}

    with monkeypatch.context() as patch:
        patch.setattr(StreamMeta, "to_json", former)
        open_store(settings).ensure(STREAM)
    store = open_store(settings)
    assert b"target_signal" not in store.handle.require().schema.metadata[b"tide.stream"]
    store.ensure(STREAM)
    store.append(SAMPLES[:1], ["1"])
    assert_same(next(store.load([SAMPLES[0].meta.sample_id])), SAMPLES[0])


def test_a_damaged_blob_is_noticed(store, tmp_path):
    big = make_sample("big", 3000)  # beyond what Lance keeps inline
    store.append([big], ["1"])
    (blob, *_) = sorted((tmp_path / "store").rglob("*.blob"), key=lambda path: -path.stat().st_size)
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(BlobCorrupt, match="big"):
        list(store.load(["big"]))


def test_missing_samples_are_named(store):
    store.append(SAMPLES[:1], ["1"])
    (ref,) = store.refs()
    with pytest.raises(SamplesMissing, match="nope"):
        list(store.load(["s0", "it's nope"]))
    with pytest.raises(SamplesMissing, match="s0"):
        list(store.load([replace(ref, row_id=ref.row_id + 7)]))


def test_a_store_that_is_down_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    settings = Settings(storage={"uri": "s3://bucket/p", "endpoint": "http://127.0.0.1:9"}, state=tmp_path)
    store = open_store(settings)
    with pytest.raises(StoreUnavailable, match=r"s3://bucket/p/demo/hidden_states.lance"):
        store.tip()
    assert not LanceFeatureStore(store).health().ok


def test_refs_of_thousands_of_rows(store):
    rows = [make_sample(f"m{number}", 2, seed=number % 7) for number in range(4000)]
    for start in range(0, 4000, 1000):
        store.append(rows[start : start + 1000], [str(start)])
    assert len(store.refs()) == 4000
    np.testing.assert_array_equal(
        next(iter(store.load(["m3999"]))).tensors["input_ids"], rows[-1].tensors["input_ids"]
    )


def test_where_speaks_of_row_ids_too(store):
    store.append(SAMPLES, ["1"])
    refs = store.refs()
    assert store.refs(where=f"_rowid > {refs[3].row_id}") == refs[4:]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_samples_are_stored_as_they_came_and_come_out_unpacked(store, form):
    packed = [pack(sample, form) for sample in SAMPLES[:3]] + SAMPLES[3:]
    store.append(packed, ["1"])
    assert [ref.aux_format for ref in store.refs()] == [form] * 3 + ["bf16"] * 3
    assert len(store.refs(where=f"aux_format = '{form}'")) == 3
    features = 3 * STREAM.hidden_size
    for found, sample in zip(store.load(store.refs()), packed, strict=True):
        assert_same(found, unpack(sample, features))
    stored = store.handle.require().to_table(columns=["aux_bytes", "teacher_ids_bytes"]).to_pydict()
    assert stored["aux_bytes"] == [sample.tensors["aux"].nbytes for sample in packed]
    ids = [sample.tensors["teacher_ids"] for sample in packed]
    assert stored["teacher_ids_bytes"] == [each.nbytes // 2 for each in ids], "a small vocabulary"


def test_teacher_ids_of_a_large_vocabulary(settings):
    stream = replace(STREAM, vocab_size=1 << 17)
    store = open_store(settings)
    store.ensure(stream)
    sample = make_sample("a")
    sample.tensors["teacher_ids"][0, 0] = 100_000
    store.append([sample], ["1"])
    assert_same(next(store.load(["a"])), sample)


def test_a_packed_sample_of_another_width_is_refused(store):
    packed = pack(SAMPLES[0], "int8")
    packed.tensors["aux"] = packed.tensors["aux"][:-1]
    with pytest.raises(StreamMismatch, match="hidden_size"):
        store.append([packed], ["1"])


def test_two_commits_on_one_snapshot(settings, store):
    """Also across a commit that the second has not seen, and on an empty dataset."""
    other = open_store(settings)
    for number in range(3):
        ours, theirs = store.snapshot(), other.snapshot()
        store.commit(store.write([make_sample(f"a{number}")]), [f"a{number}"], ours)
        with pytest.raises(CommitRaced, match="read the newest"):
            other.commit(other.write([make_sample(f"b{number}")]), [f"b{number}"], theirs)
    assert [ref.sample_id for ref in store.refs()] == ["a0", "a1", "a2"]


def test_a_poll_costs_two_reads_at_most(store):
    dataset = store.handle.require()
    for number in range(30):
        store.append([make_sample(f"s{number}")], [str(number)])
    reader = store.handle.open(dataset.version)
    reader.io_stats_incremental()
    reader.checkout_version(reader.latest_version).count_rows()
    assert reader.io_stats_incremental().read_iops <= 3


def test_the_time_index_is_there_and_used(store):
    store.append(SAMPLES, ["1"])
    store.handle.require().optimize.optimize_indices()
    dataset = store.handle.require()
    assert "BTree" in dataset.scanner(columns=["sample_id"], filter="captured_at >= 5").explain_plan()


def test_what_is_read_back(store):
    store.append([make_sample(f"s{number}", 3000, seed=number) for number in range(4)], ["1"])
    wanted = {f"s{number}": 1.8e9 for number in range(5)}
    rng = random.Random(1)
    assert store.read_back(wanted, 1.0, rng) == ({"s4"}, [])
    (blob,) = store.handle.folder.rglob("*.blob")
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    missing, damaged = store.read_back(wanted, 1.0, rng)
    assert missing == {"s4"} and len(damaged) == 1
    store.remove(damaged)
    assert store.tip().rows == 3
