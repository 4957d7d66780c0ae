"""Store and ingest on a real S3 server (SeaweedFS with authentication)."""

import threading
import time

import pytest
from seaweed import Seaweed, s3_storage, seaweed  # noqa: F401 (fixtures)

from tests.synthetic import STREAM, assert_same, make_sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings
from tide_platform.config.schema import Storage
from tide_platform.ingest.service import Ingest
from tide_platform.store.errors import (
    BlobCorrupt,
    CommitRaced,
    ObjectMissing,
    StoreRefused,
    StoreUnavailable,
    VersionGone,
)
from tide_platform.store.hidden_states import open_store
from tide_platform.store.lease import StoreLease
from tide_platform.store.objects import ObjectStore
from tide_platform.store.upkeep import Upkeep

pytestmark = pytest.mark.integration


@pytest.fixture
def settings(tmp_path, s3_storage):  # noqa: F811
    fast = {"commit_seconds": 0, "poll_seconds": 0.02}
    return Settings(storage=s3_storage.model_dump(), state=tmp_path, ingest=fast)


def seal(settings, *ids):
    settings.spool_folder.mkdir(parents=True, exist_ok=True)
    segment = SegmentWriter(settings.spool_folder, STREAM)
    for sample_id in ids:
        segment.append(make_sample(sample_id, 300))
    return segment.seal()


def test_objects(settings, tmp_path):
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    objects.ensure_bucket()
    objects.probe_conditional_put()
    assert objects.list() == []
    assert objects.put_bytes("a/b", b"1") and not objects.put_bytes("a/b", b"2", only_if_absent=True)
    assert objects.get_bytes("a/b") == b"1" and objects.exists("a/b") and objects.list("a/") == ["a/b"]
    with pytest.raises(ObjectMissing, match="nope"):
        objects.get_bytes("nope")
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (40 << 12))  # 40 MiB: several parts
    (folder / "config.json").write_text("{}")
    sums = objects.put_folder(folder, "demo/drafts/x")
    assert objects.exists("demo/drafts/x")
    assert objects.get_folder("demo/drafts/x", tmp_path / "fetched") == sums


def test_wrong_keys_are_refused_by_name(settings, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreRefused, match="AWS_SECRET_ACCESS_KEY"):
        ObjectStore(settings.storage).ensure_bucket()


def test_round_trip(settings):
    ObjectStore(settings.storage).ensure_bucket()
    store = open_store(settings)
    assert store.tip().version == 0 and store.refs() == []
    store.ensure(STREAM)
    wanted = [make_sample(f"s{number}", 200, seed=number) for number in range(5)]
    store.append(wanted, ["x"])
    other = open_store(settings)
    reader = store.handle.require()
    reader.io_stats_incremental()
    assert reader.checkout_version(reader.latest_version).count_rows() == 5
    assert reader.io_stats_incremental().read_iops <= 3, "a poll"
    assert other.tip().rows == 5 and other.committed_segments() == {"x"}
    for found, sample in zip(
        other.load([s.meta.sample_id for s in reversed(wanted)]), reversed(wanted), strict=True
    ):
        assert_same(found, sample)


def test_a_store_that_goes_down_and_comes_back(settings, tmp_path, caplog):
    """Its own server: the session's is shared."""
    server = Seaweed(tmp_path / "weed")
    server.folder.mkdir()
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        settings.storage = Storage(uri="s3://down/tide", endpoint=server.endpoint)
        stop = threading.Event()
        ingest = Ingest(settings, stop)
        thread = threading.Thread(target=ingest.run)
        thread.start()
        try:
            seal(settings, "before")
            _until(lambda: ingest.counts["samples"] == 1)
            time.sleep(1)  # SeaweedFS answers a put before its volume server has told the master of it
            server.stop()
            path = seal(settings, "during")
            _until(lambda: "nothing is lost" in caplog.text)
            assert path.exists() and ingest.counts["samples"] == 1
            server.start()
            _until(lambda: ingest.counts["samples"] == 2)
            assert not path.exists()
            assert [ref.sample_id for ref in open_store(settings).refs()] == ["before", "during"]
        finally:
            stop.set()
            thread.join(60)
            server.stop()


def test_once_ends_with_a_named_error_when_the_store_is_down(settings, monkeypatch):
    seal(settings, "a")
    settings.storage = Storage(uri="s3://bucket", endpoint="http://127.0.0.1:9")
    monkeypatch.setattr("tide_platform.ingest.service._ATTEMPTS_ONCE", 1)
    with pytest.raises(StoreUnavailable, match="s3://bucket"):
        Ingest(settings).run(once=True)


def _until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_two_commits_on_one_snapshot(settings):
    ObjectStore(settings.storage).ensure_bucket()
    one, two = open_store(settings), open_store(settings)
    one.ensure(STREAM)
    for number in range(2):
        ours, theirs = one.snapshot(), two.snapshot()
        one.commit(one.write([make_sample(f"a{number}")]), [f"a{number}"], ours)
        with pytest.raises(CommitRaced):
            two.commit(two.write([make_sample(f"a{number}")]), [f"a{number}"], theirs)
    assert [ref.sample_id for ref in two.refs()] == ["a0", "a1"]


def test_the_lease(settings):
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    first, second = (StoreLease(objects, "demo/leases/x", 0.4) for _ in range(2))
    assert first.try_hold() and not second.try_hold()
    first.release()
    _until(second.try_hold, 10)
    assert second.epoch == 2 and not first.try_hold()


def test_upkeep_and_the_space_that_it_gives_back(settings, seaweed):  # noqa: F811
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    store = open_store(settings)
    store.ensure(STREAM)
    for number in range(20):
        store.append([make_sample(f"s{number}", 3000, seed=number, tenant="ab"[number % 2])], [str(number)])
    pinned = store.tip().version
    dead = store.write([make_sample("dead", 3000)])
    settings.maintain.keep_hours, settings.maintain.vacuum_url = 1e-9, seaweed.master
    settings.retention.tenants = {"a": 1.0}
    upkeep = Upkeep(settings, store, objects, lambda: {pinned}, lambda: time.time() + 60)
    upkeep.run(everything=True)
    assert upkeep.counts.expired_samples == 0, "the samples of these tests are of the year 2027"
    assert len(store.handle.require(fresh=True).get_fragments()) < 10 and upkeep.counts.vacuums == 1
    assert len(list(store.load(store.refs(pinned), pinned))) == 20
    upkeep._now = lambda: 1.9e9
    upkeep.run(everything=True)
    assert upkeep.counts.expired_samples == 10 and {ref.tenant for ref in store.refs()} == {"b"}
    assert upkeep.counts.orphans_removed == 2 and dead
    with pytest.raises(VersionGone):
        store.refs(pinned)
    assert len(list(store.load(store.refs()))) == 10


def test_a_blob_that_is_short_or_damaged(settings):
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    store = open_store(settings)
    store.ensure(STREAM)
    store.append([make_sample("a", 3000)], ["1"])
    (key,) = [key for key in objects.list("demo/hidden_states.lance/data/") if key.endswith(".blob")]
    content = bytearray(objects.get_bytes(key))
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), bytes(content[: len(content) // 2]), b""):
        objects.put_bytes(key, damaged)
        with pytest.raises(BlobCorrupt, match="sample a"):
            list(open_store(settings).load(["a"]))
