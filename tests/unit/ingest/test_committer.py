"""Exactly once, with a dataset that fails where it is told to."""

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config.schema import Ingest as Limits
from tide_platform.config.schema import Storage
from tide_platform.ingest.counts import Counts
from tide_platform.ingest.segments import Segments
from tide_platform.ingest.worker import Worker
from tide_platform.store.errors import CommitRaced, StoreUnavailable, StreamMismatch
from tide_platform.store.lease import StoreLease
from tide_platform.store.objects import ObjectStore
from tide_platform.store.pending import Pending

OTHER = type(STREAM)(**{**STREAM.__dict__, "target_digest": "other"})


class Dataset:
    """In memory, shared by its workers; ``fail``: None, "before" or "after" the commit takes place."""

    def __init__(self):
        self.samples, self.segments, self.version, self.fail = [], [], 1, None
        self.written, self.damaged, self.removed = {}, [], []

    def ensure(self, stream):
        if stream != STREAM:
            raise StreamMismatch("memory", STREAM, stream)

    def snapshot(self):
        return self.version

    def write(self, samples):
        name = str(len(self.written))
        self.written[name] = [sample.meta.sample_id for sample in samples]
        return [name]

    def commit(self, fragments, segment_ids, snapshot):
        fail, self.fail = self.fail, None
        if fail == "before":
            raise StoreUnavailable("memory", "down")
        if snapshot != self.version:
            raise CommitRaced("memory", snapshot, "outdated")
        self.samples += [name for fragment in fragments for name in self.written[fragment]]
        self.segments.append(set(segment_ids))
        self.version += 1
        if fail == "after":
            raise StoreUnavailable("memory", "result unknown")
        return self.version

    def committed_segments(self, snapshot):
        return set().union(*self.segments)

    def sample_ids(self, since, snapshot):
        return set(self.samples)

    def read_back(self, samples, share, rng):
        damaged, self.damaged = self.damaged, []
        return set(samples) - set(self.samples), damaged

    def remove(self, sample_ids):
        self.samples = [name for name in self.samples if name not in sample_ids]
        self.segments, self.version = [], self.version + 1


@pytest.fixture
def dataset():
    return Dataset()


class Site:
    """A folder with as many workers as asked for; ``seconds`` is the lease's."""

    def __init__(self, tmp_path, dataset, seconds=0.05):
        self.folder, self.dataset, self.seconds = tmp_path / "spool", dataset, seconds
        self.objects = ObjectStore(Storage(uri=str(tmp_path / "store")))
        self.folder.mkdir()
        self.time = 0.0

    def worker(self, folder=None):
        counts, limits = Counts(), Limits(commit_seconds=0, lease_seconds=10)
        lease = StoreLease(self.objects, "demo/leases/commit", 10, lambda: self.time)
        segments = Segments(folder or self.folder, limits, counts)
        pending = Pending(self.objects, "demo")
        worker = Worker(self.dataset, pending, lease, segments, limits, counts, "w")
        return worker, counts

    def seal(self, *ids, stream=STREAM, folder=None, **changes):
        segment = SegmentWriter(folder or self.folder, stream)
        for sample_id in ids:
            segment.append(make_sample(sample_id, **changes))
        return segment.seal()

    def left(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def site(tmp_path, dataset):
    return Site(tmp_path, dataset)


def test_a_batch_is_one_commit_and_the_segments_go(site, dataset):
    paths = [site.seal("a", "b"), site.seal("c")]
    worker, counts = site.worker()
    assert worker.step() and not worker.step()
    assert dataset.samples == ["a", "b", "c"] or sorted(dataset.samples) == ["a", "b", "c"]
    assert dataset.segments == [{path.stem for path in paths}] and site.left() == []
    assert (counts.samples, counts.segments, counts.commits) == (3, 2, 1)


@pytest.mark.parametrize("fail", ["before", "after"])
def test_a_failed_or_unknown_commit_is_tried_again_without_duplicates(site, dataset, fail):
    paths = [site.seal("a", "b"), site.seal("c")]
    worker, counts = site.worker()
    dataset.fail = fail
    with pytest.raises(StoreUnavailable):
        worker.step()
    assert all(path.exists() for path in paths), "nothing is deleted before the commit is known"
    worker.step()
    assert sorted(dataset.samples) == ["a", "b", "c"] and site.left() == []
    assert counts.already_committed == (2 if fail == "after" else 0)


def test_segments_of_a_process_that_died_after_its_commit(site, dataset):
    path = site.seal("a", "b")
    dataset.samples, dataset.segments = ["a", "b"], [{path.stem}]
    worker, counts = site.worker()
    worker.step()
    assert dataset.samples == ["a", "b"] and counts.already_committed == 1 and site.left() == []


def test_samples_that_are_there_are_left_out(site, dataset):
    dataset.samples = ["a"]
    site.seal("a", "b"), site.seal("b", "c"), site.seal("c")
    worker, counts = site.worker()
    while worker.step():
        pass
    assert sorted(dataset.samples) == ["a", "b", "c"] and counts.duplicates == 3
    assert counts.segments == 3 and site.left() == []


def test_a_corrupt_segment_is_set_aside_with_a_report_and_stops_nothing(site, dataset):
    bad, _ = site.seal("a"), site.seal("b")
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 4
    bad.write_bytes(content)
    worker, counts = site.worker()
    worker.step()
    assert dataset.samples == ["b"] and counts.corrupt == 1
    assert site.left() == [f"{bad.stem}.bad", f"{bad.stem}.bad.json"]
    assert "checksum" in (site.folder / f"{bad.stem}.bad.json").read_text()


def test_another_stream_is_refused_and_stops_nothing(site, dataset):
    other, ours = site.seal("a", stream=OTHER), site.seal("b")
    worker, counts = site.worker()
    worker.step()
    assert dataset.samples == ["b"] and counts.refused == 1 and not ours.exists()
    assert site.left() == [f"{other.stem}.refused", f"{other.stem}.refused.json"]


def test_a_segment_that_the_spool_deleted_first(site, dataset, monkeypatch):
    gone, there = site.seal("a"), site.seal("b")
    worker, counts = site.worker()
    real = worker._segments.read
    monkeypatch.setattr(worker._segments, "read", lambda paths: [gone.unlink(), real(paths)][1])
    worker.step()
    assert dataset.samples == ["b"] and counts.gone == 1 and not there.exists()


def test_one_worker_commits_what_both_wrote(site, dataset, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    (leader, leads), (follower, follows) = site.worker(), site.worker(second)
    leader.step()
    path = site.seal("x", folder=second)
    assert follower.step() and follower.waiting and path.exists() and dataset.samples == []
    site.seal("a")
    leader.step()
    assert sorted(dataset.samples) == ["a", "x"] and leads.commits == 1 and len(dataset.segments) == 1
    assert path.exists(), "its own worker deletes it when it has seen the sample in the dataset"
    assert follower.step() and not follower.waiting and not path.exists()
    assert (leads.samples, follows.samples, follows.commits) == (1, 1, 0)


def test_the_lease_moves_when_its_holder_stands_still(site, dataset, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    (leader, _), (follower, counts) = site.worker(), site.worker(second)
    leader.step()
    site.seal("x", folder=second)
    follower.step()
    site.time += 11
    follower.step(), follower.step()
    assert dataset.samples == ["x"] and counts.leases_taken == 1
    site.seal("y", folder=second), site.seal("a")
    snapshot = leader._known.snapshot()
    leader._lease._renewed = site.time  # it slept, and believes that it holds the lease
    follower.step()
    assert snapshot < dataset.version
    assert leader.step() and "a" not in dataset.samples, "a commit on what it knew conflicts"
    leader.step()
    assert sorted(dataset.samples) == ["a", "x", "y"]


def test_two_workers_with_the_same_samples(site, dataset, tmp_path):
    """A copied spool folder: one wins, the other's fragments are dropped."""
    second = tmp_path / "second"
    second.mkdir()
    (leader, leads), (follower, _) = site.worker(), site.worker(second)
    leader.step()
    path = site.seal("a", "b")
    (second / path.name).write_bytes(path.read_bytes())
    site.seal("c", "b", folder=second)
    follower.step()
    leader.step()
    while follower.step() or leader.step():
        pass
    assert sorted(dataset.samples) == ["a", "b", "c"]
    assert leads.dropped_batches == 1 and not list(second.glob("*.seg")) and site.left() == []


def test_a_damaged_entry_is_set_aside_and_its_writer_writes_again(site, dataset, tmp_path):
    second = tmp_path / "second"
    second.mkdir()
    (leader, counts), (follower, _) = site.worker(), site.worker(second)
    leader.step()
    site.seal("a", folder=second)
    follower.step()
    (entry,) = (tmp_path / "store" / "demo" / "pending").iterdir()
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(content)
    leader.step()
    assert counts.bad_entries == 1 and (tmp_path / "store" / "demo" / "set-aside" / entry.name).exists()
    while follower.step() or leader.step():
        pass
    assert dataset.samples == ["a"] and not list(second.glob("*.seg"))


def test_what_is_read_back_wrong_is_stored_again(site, dataset):
    path = site.seal("a", "b")
    worker, counts = site.worker()
    dataset.damaged = ["a"]
    with pytest.raises(StoreUnavailable, match="read back wrong"):
        worker.step()
    assert path.exists() and dataset.samples == ["b"] and counts.damaged == 1
    worker.step()
    assert sorted(dataset.samples) == ["a", "b"] and site.left() == []
