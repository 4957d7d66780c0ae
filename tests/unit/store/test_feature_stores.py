"""One contract; every backend passes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic import LAST_STREAM, STREAM, assert_same, make_sample
from tide_platform.capture.packing import pack, unpack
from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings
from tide_platform.store.errors import (
    BlobCorrupt,
    BudgetExceeded,
    SampleReleased,
    SamplesMissing,
    StaleGeneration,
)
from tide_platform.store.feature_store import FeatureStore, Key
from tide_platform.store.hidden_states import open_store
from tide_platform.store.lance_features import LanceFeatureStore
from tide_platform.store.shared_dir import SharedDirFeatureStore

FEATURES = 3 * STREAM.hidden_size
SAMPLES = [make_sample(f"s/{number}..", 2000 + number, seed=number) for number in range(4)]


@dataclass
class Backend:
    """``open`` gives another consumer of the same store; ``objects`` the files that hold tensors."""

    root: Path
    lance: bool

    def open(self, budget: int | None = None, stream: StreamMeta = STREAM) -> FeatureStore:
        if not self.lance:
            return SharedDirFeatureStore(self.root, FEATURES, budget, torn_seconds=0.0)
        store = open_store(Settings(storage={"uri": str(self.root)}))
        store.ensure(stream)
        return LanceFeatureStore(store, budget)

    def objects(self) -> list[Path]:
        return sorted(self.root.rglob("*.blob" if self.lance else "g*.bin"))


@pytest.fixture(params=["lance", "shared_dir"])
def backend(request: Any, tmp_path: Path) -> Backend:
    return Backend(tmp_path / "store", request.param == "lance")


def test_what_was_put_is_got_in_the_order_asked_for(backend):
    keys = backend.open().put(SAMPLES, "batch")
    assert [key.sample_id for key in keys] == [sample.meta.sample_id for sample in SAMPLES]
    for order in ([0, 1, 2, 3], [3, 1], [2, 2, 0]):
        for index, sample in zip(order, backend.open().get([keys[i] for i in order]), strict=True):
            assert_same(sample, SAMPLES[index])
    assert list(backend.open().get([])) == []


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_packed_samples_come_out_unpacked(backend, form):
    packed = pack(SAMPLES[0], form)
    (sample,) = backend.open().get(backend.open().put([packed], "b"))
    assert_same(sample, unpack(packed, FEATURES))


def test_a_stream_with_last_hidden_states(backend):
    wanted = make_sample("last", 700, 5, LAST_STREAM)
    store = backend.open(stream=LAST_STREAM)
    (sample,) = store.get(store.put([wanted], "b"))
    assert_same(sample, wanted)
    assert store.health().used_bytes >= sum(array.nbytes for array in wanted.tensors.values()) // 2


def test_get_after_release(backend):
    store = backend.open()
    keys = store.put(SAMPLES, "batch")
    store.release(keys[:2])
    store.release(keys[:1])
    with pytest.raises(SampleReleased, match="s/0"):
        list(store.get(keys[:1]))
    with pytest.raises(SampleReleased):
        list(store.get(keys))
    assert len(list(store.get(keys[2:]))) == 2


def test_get_after_abort(backend):
    store = backend.open()
    first, second = store.put(SAMPLES[:2], "one"), store.put(SAMPLES[2:], "two")
    store.abort("one")
    store.abort("one")
    store.abort("never was")
    with pytest.raises(SampleReleased, match="s/0"):
        list(store.get(first))
    assert len(list(store.get(second))) == 2
    with pytest.raises((SampleReleased, SamplesMissing)):
        list(backend.open().get(first))


def test_what_never_was(backend):
    with pytest.raises(SamplesMissing, match="nope"):
        list(backend.open().get([Key("nope", 1)]))


def test_a_reader_with_an_old_generation_is_refused(backend):
    store = backend.open()
    (old,) = store.put(SAMPLES[:1], "one")
    again = make_sample(SAMPLES[0].meta.sample_id, 2500, seed=9)
    (new,) = store.put([again], "two")
    assert new.sample_id == old.sample_id and new.generation > old.generation
    with pytest.raises(StaleGeneration, match=r"s/0"):
        list(store.get([old]))
    (found,) = store.get([new])
    assert_same(found, again)


def test_a_released_sample_may_be_put_again(backend):
    store = backend.open()
    (old,) = store.put(SAMPLES[:1], "one")
    store.release([old])
    (new,) = store.put(SAMPLES[:1], "two")
    assert len(list(store.get([new]))) == 1
    with pytest.raises((SampleReleased, StaleGeneration)):
        list(store.get([old]))


def test_the_byte_budget(backend):
    size = sum(SAMPLES[0].tensors[name].nbytes for name in ("aux", "teacher_ids", "teacher_logp"))
    store = backend.open(budget=int(size * 2.5))
    keys = store.put(SAMPLES[:1], "one")
    with pytest.raises(BudgetExceeded, match="budget"):
        store.put(SAMPLES[1:], "two")
    with pytest.raises(SamplesMissing):
        list(store.get([Key(SAMPLES[1].meta.sample_id, keys[0].generation + 1)]))
    health = store.health()
    assert health.ok and 0 < health.used_bytes <= health.budget_bytes == int(size * 2.5)


def test_health(backend, tmp_path):
    store = backend.open()
    assert store.health().ok and store.health().used_bytes == 0
    store.put(SAMPLES, "batch")
    health = store.health()
    assert health.ok and "4 samples" in health.detail and health.used_bytes > 0


def test_gc_frees_what_is_gone_and_keeps_what_is_there(backend):
    store = backend.open()
    store.abort("zero")
    keys = store.put(SAMPLES, "batch")
    store.put(SAMPLES[:1], "other")
    store.abort("other")
    store.release(keys[1:2])
    assert store.gc() >= 0
    assert len(list(store.get(keys[2:]))) == 2


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_damaged_object_is_noticed(backend, damage):
    keys = backend.open().put(SAMPLES[:1], "batch")
    (path,) = backend.objects()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"torn": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    with pytest.raises(BlobCorrupt, match="s/0"):
        list(backend.open().get(keys))


def test_a_put_that_died_is_not_seen_and_freed(tmp_path, monkeypatch):
    store = SharedDirFeatureStore(tmp_path, FEATURES, torn_seconds=-1.0)
    monkeypatch.setattr(store, "_batch", lambda batch_id: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.put(SAMPLES[:2], "batch")
    fresh = SharedDirFeatureStore(tmp_path, FEATURES, torn_seconds=-1.0)
    assert "0 samples" in fresh.health().detail and fresh.health().used_bytes > 0
    assert fresh.gc() > 0 and fresh.health().used_bytes == 0


def test_a_folder_that_cannot_be_reached(tmp_path):
    store = SharedDirFeatureStore(tmp_path / "x", FEATURES)
    for path in sorted((tmp_path / "x").rglob("*"), reverse=True):
        path.rmdir()
    (tmp_path / "x").rmdir()
    assert not store.health().ok
