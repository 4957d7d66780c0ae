"""Exactly once, with a dataset that fails where it is told to."""

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.ingest.committer import Committer
from tide_platform.store.errors import StoreUnavailable, StreamMismatch


class Dataset:
    """In memory; ``fail``: None, "before" or "after" the commit takes place."""

    def __init__(self):
        self.samples, self.last, self.fail, self.appends = [], set(), None, 0

    def ensure(self, stream):
        if stream != STREAM:
            raise StreamMismatch("memory", STREAM, stream)

    def append(self, samples, segment_ids):
        fail, self.fail = self.fail, None
        if fail == "before":
            raise StoreUnavailable("memory", "down")
        self.samples += [sample.meta.sample_id for sample in samples]
        self.last, self.appends = set(segment_ids), self.appends + 1
        if fail == "after":
            raise StoreUnavailable("memory", "result unknown")

    def committed_segments(self):
        return self.last

    def sample_ids(self, since):
        return set(self.samples)


def seal(folder, *ids, stream=STREAM, **changes):
    segment = SegmentWriter(folder, stream)
    for sample_id in ids:
        segment.append(make_sample(sample_id, **changes))
    return segment.seal()


@pytest.fixture
def dataset():
    return Dataset()


def test_a_batch_is_one_commit_and_the_segments_go(tmp_path, dataset):
    paths = [seal(tmp_path, "a", "b"), seal(tmp_path, "c")]
    committer = Committer(dataset)
    committer.commit(paths)
    assert dataset.samples == ["a", "b", "c"] and dataset.appends == 1
    assert dataset.last == {path.stem for path in paths}
    assert list(tmp_path.iterdir()) == []
    assert (committer.counts.samples, committer.counts.segments) == (3, 2)


@pytest.mark.parametrize("fail", ["before", "after"])
def test_a_failed_or_unknown_commit_is_tried_again_without_duplicates(tmp_path, dataset, fail):
    paths = [seal(tmp_path, "a", "b"), seal(tmp_path, "c")]
    dataset.fail, committer = fail, Committer(dataset)
    with pytest.raises(StoreUnavailable):
        committer.commit(paths)
    assert all(path.exists() for path in paths), "nothing is deleted before the commit is known"
    committer.commit(paths)
    assert sorted(dataset.samples) == ["a", "b", "c"] and list(tmp_path.iterdir()) == []


def test_death_between_commit_and_delete(tmp_path, dataset, monkeypatch):
    paths = [seal(tmp_path, "a"), seal(tmp_path, "b")]
    dying = Committer(dataset)
    monkeypatch.setattr(dying, "_delete", lambda paths: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        dying.commit(paths)
    assert all(path.exists() for path in paths)
    next_one = Committer(dataset)
    next_one.commit([*paths, seal(tmp_path, "c")])
    assert dataset.samples == ["a", "b", "c"] and next_one.counts.already_committed == 2


def test_the_same_sample_in_two_segments_is_stored_once(tmp_path, dataset):
    committer = Committer(dataset)
    committer.commit([seal(tmp_path, "a", "b"), seal(tmp_path, "b", "c")])
    committer.commit([seal(tmp_path, "c", "d", captured_at=1.7e9)])
    committer.commit([seal(tmp_path, "d")])
    assert dataset.samples == ["a", "b", "c", "d"] and committer.counts.duplicates == 3
    assert list(tmp_path.iterdir()) == []


def test_a_corrupt_segment_is_set_aside_said_and_counted(tmp_path, dataset, caplog):
    good, bad = seal(tmp_path, "a"), seal(tmp_path, "b")
    content = bytearray(bad.read_bytes())
    content[-40] ^= 1
    bad.write_bytes(content)
    committer = Committer(dataset)
    committer.commit([good, bad])
    assert dataset.samples == ["a"] and committer.counts.corrupt == 1
    assert [path.name for path in tmp_path.iterdir()] == [f"{bad.stem}.bad"]
    assert bad.name in caplog.text


def test_segments_of_another_stream_are_set_aside(tmp_path, dataset, caplog):
    from dataclasses import replace

    seal(tmp_path, "x", stream=replace(STREAM, target_digest="other"), target_digest="other")
    seal(tmp_path, "a")
    committer = Committer(dataset)
    committer.commit(sorted(tmp_path.glob("*.seg")))
    assert dataset.samples == ["a"] and committer.counts.refused == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".refused"]
    assert "target_digest" in caplog.text
