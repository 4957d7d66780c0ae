"""Faults of disk, clock and bytes in the spool: samples are stored whole, or dropped and counted."""

import errno
import fcntl
import json
import logging
import os
import random
import resource
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.faults.test_spool_kill import until
from tests.synthetic import STREAM, begin, finish, make_sample, send, write_rows
from tide_platform.capture.folder import sealed_segments
from tide_platform.capture.ring import DATA_OFFSET, STREAM_OFFSET, Ring
from tide_platform.capture.segment import CorruptSegment, read_segment
from tide_platform.capture.spool import Spool, SpoolSettings
from tide_platform.capture.writer import RingWriter


def stored(folder):
    """Samples by id, each compared with what was sent."""
    found = {}
    for path in sealed_segments(folder):
        for sample in read_segment(path)[1]:
            assert sample.meta.sample_id not in found, "twice"
            wanted = numbered(int(sample.meta.sample_id))
            for name, array in wanted.tensors.items():
                np.testing.assert_array_equal(sample.tensors[name], array, name)
            found[sample.meta.sample_id] = sample
    return found


def numbered(number, tokens=20):
    return make_sample(str(number), tokens, seed=number)


def status(folder):
    return json.loads((folder / "spool.json").read_text())


def spool_of(tmp_path, **settings):
    spool = Spool(tmp_path / "ring", tmp_path / "spool", SpoolSettings(segment_seconds=0.05, **settings))
    spool.recover()
    return spool


def step_until_empty(spool, ring):
    until(lambda: not spool.step() and ring.tail == ring.head)


class SickDisk:
    """Calls of ``os`` that fail now and then, by a seed."""

    def __init__(self, seed, share, number):
        self.rng, self.share, self.number, self.failed = random.Random(seed), share, number, 0

    def __call__(self, real):
        def call(*arguments):
            if self.rng.random() < self.share:
                self.failed += 1
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments)

        return call


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        (("posix_fallocate",), errno.ENOSPC),
        (("pwritev", "fsync"), errno.EIO),
        (("posix_fallocate", "pwritev", "ftruncate", "fsync"), errno.ENOSPC),
    ],
)
def test_a_disk_that_fails_now_and_then(tmp_path, monkeypatch, calls, number):
    monkeypatch.setattr("tide_platform.capture.disk._RETRY_SECONDS", 0.01)
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, spool = RingWriter(ring), spool_of(tmp_path, segment_bytes=1 << 16)
    disk, sent = SickDisk(number, 0.3, number), 0
    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, disk(getattr(os, name)))
        for _ in range(30):
            for _ in range(10):
                assert send(writer, numbered(sent))
                sent += 1
            step_until_empty(spool, ring)
        spool.seal_and_wait()
        spool.close()
    found, told = stored(tmp_path / "spool"), status(tmp_path / "spool")
    assert disk.failed > 5
    assert len(found) + told["dropped"].get("spool_disk", 0) == sent
    assert set(told["dropped"]) <= {"spool_disk"}
    assert "posix_fallocate" in calls or len(found) == sent, "what was accepted only waits"


def test_a_full_disk_drops_and_counts_and_goes_on(tmp_path):
    """The kernel's own refusal: no file of the spool may grow beyond 64 KiB."""
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, folder = RingWriter(ring), tmp_path / "spool"
    limits = (1 << 16, resource.RLIM_INFINITY)
    command = [sys.executable, "-m", "tide_platform.capture.spool", "--ring", ring.path, "--folder", folder]
    process = subprocess.Popen(
        [*command, "--segment-seconds", "0.1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )
    try:
        large = make_sample("large", 1000)  # 90 kB
        for number in range(40):
            assert send(writer, numbered(number)) and send(writer, large, step=50)
            until(lambda: ring.tail == ring.head)
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
    assert sorted(map(int, stored(folder))) == list(range(40))
    assert status(folder)["dropped"] == {"spool_disk": 40}


def test_a_clock_that_goes_back(tmp_path, monkeypatch):
    """Segments keep the order they were written in, and a living spool does not look dead."""
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, spool = RingWriter(ring), spool_of(tmp_path)
    real, real_ns, hours = time.time, time.time_ns, [0]
    monkeypatch.setattr(time, "time", lambda: real() - 3600 * hours[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 3600 * 10**9 * hours[0])
    for number in range(6):
        hours[0] = number % 3
        assert send(writer, numbered(number))
        step_until_empty(spool, ring)
        spool.seal_and_wait()
        assert ring.spool_age() < 30
    spool.close()
    assert list(stored(tmp_path / "spool")) == [str(number) for number in range(6)]
    assert status(tmp_path / "spool")["dropped"] == {}


def test_a_ring_that_is_full_under_load_drops_whole_samples(tmp_path):
    """The producer never waits; the spool gets a turn now and then."""
    ring = Ring.create(tmp_path / "ring", 1 << 16, STREAM)
    writer, spool, rng = RingWriter(ring), spool_of(tmp_path), random.Random(3)
    ended = set()
    for first in range(0, 600, 4):
        samples = [numbered(number) for number in range(first, first + 4)]
        for sample in samples:
            begin(writer, sample)
        for at in range(0, 20, 5):
            for sample in samples:
                write_rows(writer, sample, at, at + 5, confirmed=True)
        ended |= {sample.meta.sample_id for sample in samples if finish(writer, sample, 20)}
        if rng.random() < 0.1:
            step_until_empty(spool, ring)
    step_until_empty(spool, ring)
    spool.seal_and_wait()
    spool.close()
    assert stored(tmp_path / "spool").keys() == ended and len(ended) < 600
    told = status(tmp_path / "spool")
    assert told["ring_dropped"] == {"ring_full": 600 - len(ended)} and told["dropped"] == {}


def test_an_ingest_that_is_away_for_long(tmp_path):
    """The spool grows to its budget; then the oldest segment goes, and its samples are counted."""
    ring, budget = Ring.create(tmp_path / "ring", 1 << 20, STREAM), 60_000
    writer = RingWriter(ring)
    spool = spool_of(tmp_path, segment_bytes=1 << 14, spool_bytes=budget)
    for sent in range(120):
        assert send(writer, numbered(sent))
        step_until_empty(spool, ring)
    spool.seal_and_wait()
    spool.close()
    found, told = stored(tmp_path / "spool"), status(tmp_path / "spool")
    waiting = sum(path.stat().st_size for path in sealed_segments(tmp_path / "spool"))
    assert budget / 2 < waiting <= budget
    assert list(found) == [str(number) for number in range(120 - len(found), 120)]
    assert told["dropped"] == {"spool_full": 120 - len(found)}


def test_a_segment_that_is_being_ingested_survives_the_budget(tmp_path):
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, spool = RingWriter(ring), spool_of(tmp_path, segment_bytes=1 << 12, spool_bytes=20_000)
    assert send(writer, numbered(0))
    step_until_empty(spool, ring)
    spool.seal_and_wait()
    (claimed,) = sealed_segments(tmp_path / "spool")
    with claimed.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for sent in range(1, 40):
            assert send(writer, numbered(sent))
            step_until_empty(spool, ring)
        spool.seal_and_wait()
        assert claimed.exists()
    spool.close()
    assert "0" in stored(tmp_path / "spool")


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bytes_in_the_ring(tmp_path, caplog, seed):
    """A record that is damaged costs the requests in flight, never a wrong sample."""
    rng, ring = random.Random(seed), Ring.create(tmp_path / "ring", 1 << 18, STREAM)
    writer, spool, sent = RingWriter(ring), spool_of(tmp_path), 0
    spool.step()
    for _ in range(12):
        for _ in range(10):
            assert send(writer, numbered(sent))
            sent += 1
        # a byte that is unread, in the header's positions now and then
        at = rng.randrange(ring.tail, ring.head) % ring.capacity + DATA_OFFSET
        at = rng.choice([at, at, at, 64 + rng.randrange(8), 128 + rng.randrange(8)])
        ring.memory[at] ^= 1 << rng.randrange(8)
        for _ in range(50):
            spool.step()
        assert send(writer, numbered(sent)), "the writer's own position mends the header"
        sent += 1
        step_until_empty(spool, ring)
    spool.seal_and_wait()
    spool.close()
    found, told = stored(tmp_path / "spool"), status(tmp_path / "spool")
    lost = sent - len(found)
    assert len(found) > 0
    assert sum(told["dropped"].values()) + sum(told["ring_dropped"].values()) >= lost - 1
    assert set(told["dropped"]) <= {"ring_broken", "spool_restarted"}
    assert lost <= 40


def test_a_damaged_tail_gives_up_what_is_unread_and_counts_that(tmp_path):
    ring = Ring.create(tmp_path / "ring", 1 << 18, STREAM)
    writer, spool = RingWriter(ring), spool_of(tmp_path)
    assert send(writer, numbered(1))
    ring.tail = ring.head + 64
    spool.step()
    assert send(writer, numbered(2))
    step_until_empty(spool, ring)
    spool.seal_and_wait()
    spool.close()
    assert list(stored(tmp_path / "spool")) == ["2"]
    assert status(tmp_path / "spool")["dropped"] == {"ring_broken": 1}


@pytest.mark.parametrize("at", [0, 9, 17, 25, 29, STREAM_OFFSET, STREAM_OFFSET + 40])
def test_a_flipped_byte_in_the_rings_own_header(tmp_path, caplog, at):
    """The spool says so and waits for a ring that it can read; it takes nothing from this one."""
    ring = Ring.create(tmp_path / "ring", 1 << 18, STREAM)
    assert send(RingWriter(ring), numbered(1))
    ring.memory[at] ^= 4
    with caplog.at_level(logging.ERROR):
        spool = spool_of(tmp_path)
        for _ in range(20):
            assert not spool.step()
    assert str(ring.path) in caplog.text and len(caplog.records) <= 2, "said once"
    new = Ring.create(tmp_path / "ring", 1 << 18, STREAM)
    assert send(RingWriter(new), numbered(2))
    until(lambda: (spool.step(), new.tail == new.head)[1])
    spool.seal_and_wait()
    spool.close()
    assert list(stored(tmp_path / "spool")) == ["2"]


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bytes_in_the_spools_files(tmp_path, caplog, seed):
    """A sealed segment is refused by name; an open one is cut; the small files never stop a spool."""
    rng, ring = random.Random(seed), Ring.create(tmp_path / "ring", 1 << 18, STREAM)
    writer, spool, folder = RingWriter(ring), spool_of(tmp_path), tmp_path / "spool"
    for number in range(8):
        assert send(writer, numbered(number))
    step_until_empty(spool, ring)
    spool.seal_and_wait()
    spool.close()
    (sealed,) = sealed_segments(folder)
    content = bytearray(sealed.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    for name in ("spool.journal", "spool.json", "spool.lock"):
        path = folder / name
        small = bytearray(path.read_bytes())
        small[rng.randrange(len(small))] ^= 1 << rng.randrange(8)
        path.write_bytes(small)
    sealed.write_bytes(content)
    with pytest.raises(CorruptSegment, match=sealed.name):
        read_segment(sealed)
    sealed.rename(sealed.with_suffix(".open"))
    spool = spool_of(tmp_path)
    assert send(writer, numbered(99))
    step_until_empty(spool, ring)
    spool.seal_and_wait()
    spool.close()
    found = stored(folder)
    assert list(found) == [str(number) for number in range(len(found) - 1)] + ["99"]
    assert "was left open" in caplog.text
