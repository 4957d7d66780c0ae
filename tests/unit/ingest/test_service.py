"""``tide ingest`` on a local folder."""

import threading
import time

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings
from tide_platform.control.dataset import pinned_versions
from tide_platform.ingest.service import Ingest
from tide_platform.store.errors import StoreUnavailable
from tide_platform.store.hidden_states import open_store


@pytest.fixture
def settings(tmp_path):
    return Settings(
        storage={"uri": str(tmp_path / "store")},
        state=tmp_path / "state",
        ingest={"commit_seconds": 0, "poll_seconds": 0.01, "commit_bytes": 1 << 16},
    )


def seal(settings, *ids):
    settings.spool_folder.mkdir(parents=True, exist_ok=True)
    segment = SegmentWriter(settings.spool_folder, STREAM)
    for sample_id in ids:
        segment.append(make_sample(sample_id, 60))
    return segment.seal()


def test_once(settings):
    Ingest(settings).run(once=True)  # nothing there
    for start in range(0, 60, 6):
        seal(settings, *(str(number) for number in range(start, start + 6)))
    ingest = Ingest(settings)
    ingest.run(once=True)
    assert {ref.sample_id for ref in open_store(settings).refs()} == {str(number) for number in range(60)}
    assert ingest.counts["commits"] > 1, "a batch is bounded by commit_bytes"
    assert not list(settings.spool_folder.glob("*.seg"))


def test_runs_until_told_to_stop(settings):
    stop = threading.Event()
    ingest = Ingest(settings, stop)
    thread = threading.Thread(target=ingest.run)
    thread.start()
    seal(settings, "a")
    end = time.monotonic() + 20
    while ingest.counts["samples"] < 1 and time.monotonic() < end:
        time.sleep(0.02)
    stop.set()
    thread.join(20)
    assert not thread.is_alive() and ingest.counts["samples"] == 1


def test_it_says_that_it_lives_and_a_full_disk_does_not_end_it(settings, monkeypatch, caplog):
    monkeypatch.setattr("tide_platform.ingest.service.BEAT_SECONDS", 0.0)
    written = []

    def refuse(path, status):
        written.append(status)
        if len(written) <= 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tide_platform.ingest.service.write_status", refuse)
    stop = threading.Event()
    ingest = Ingest(settings, stop)
    thread = threading.Thread(target=ingest.run)
    thread.start()
    end = time.monotonic() + 20
    while len(written) < 5 and time.monotonic() < end:
        time.sleep(0.02)
    stop.set()
    thread.join(20)
    assert len(written) >= 5 and written[-1]["samples"] == 0, "without a sample to store"
    assert written[-1]["at"] > written[0]["at"]
    assert caplog.text.count("No space left") == 1, "said once a period"


def test_two_workers_share_a_folder(settings):
    first, second = Ingest(settings), Ingest(settings)
    assert first.status_file.name == "ingest.json" and second.status_file.name == "ingest-1.json"
    threads = [threading.Thread(target=one.run, args=(True,)) for one in (first, second)]
    for start in range(0, 60, 6):
        seal(settings, *(str(number) for number in range(start, start + 6)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    Ingest(settings).run(once=True)
    found = [ref.sample_id for ref in open_store(settings).refs()]
    assert sorted(found, key=int) == [str(number) for number in range(60)]
    assert first.counts["samples"] + second.counts["samples"] == 60


def test_a_clock_that_goes_back_delays_nothing(settings, monkeypatch):
    settings.ingest.commit_seconds = 0.05
    seal(settings, "a")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 7 * 86400)
    stop = threading.Event()
    ingest = Ingest(settings, stop)
    thread = threading.Thread(target=ingest.run)
    thread.start()
    end = time.monotonic() + 20
    while ingest.counts["samples"] < 1 and time.monotonic() < end:
        time.sleep(0.02)
    stop.set()
    thread.join(20)
    assert ingest.counts["samples"] == 1


def test_the_committing_worker_keeps_the_dataset_up(settings):
    settings.maintain.interval_s = 0.01
    stop = threading.Event()
    ingest = Ingest(settings, stop)
    thread = threading.Thread(target=ingest.run)
    thread.start()
    end = time.monotonic() + 60
    number = 0
    while not ingest._upkeep.counts.compactions and time.monotonic() < end:
        seal(settings, str(number))
        number += 1
        time.sleep(0.02)
    stop.set()
    thread.join(20)
    assert ingest._upkeep.counts.compactions and not ingest._upkeep.counts.failures
    assert '"upkeep_compactions"' in ingest.status_file.read_text()


def test_a_store_that_fails_for_a_while_loses_nothing(settings, monkeypatch, caplog):
    path, ingest, tries = seal(settings, "a"), Ingest(settings), []
    real = ingest._worker._step

    def flaky(at_once):
        tries.append(path.exists())
        if len(tries) < 3:
            raise StoreUnavailable("s3://x", "connection refused")
        return real(at_once)

    monkeypatch.setattr(ingest._worker, "_step", flaky)
    ingest.run(once=True)
    assert tries[:3] == [True, True, True] and ingest.counts["store_failures"] == 2
    assert open_store(settings).tip().rows == 1
    assert caplog.text.count("nothing is lost") == 1, "said once a period"


def test_once_gives_up_with_the_error_when_the_store_stays_down(settings, monkeypatch):
    path, ingest = seal(settings, "a"), Ingest(settings)

    def down(at_once):
        raise StoreUnavailable("s3://x", "connection refused")

    monkeypatch.setattr(ingest._worker, "_step", down)
    monkeypatch.setattr("tide_platform.ingest.service._ATTEMPTS_ONCE", 2)
    with pytest.raises(StoreUnavailable, match="connection refused"):
        ingest.run(once=True)
    assert path.exists()


def test_a_newest_version_that_cannot_be_read_is_recovered_on_the_way(settings, caplog):
    """A power cut took the commit: its segments are still there, since they go only after it was synced."""
    seal(settings, "a")
    Ingest(settings).run(once=True)
    path = seal(settings, "b", "c")
    content = path.read_bytes()
    Ingest(settings).run(once=True)
    path.write_bytes(content)
    versions = settings.state.parent / "store" / "demo" / "hidden_states.lance" / "_versions"
    min(versions.glob("*.manifest")).write_bytes(b"")
    Ingest(settings).run(once=True)
    assert {ref.sample_id for ref in open_store(settings).refs()} == {"a", "b", "c"}
    assert "set aside" in caplog.text and "at most 2 samples" in caplog.text


def test_a_ledger_that_cannot_be_read_stops_upkeep_only(settings):
    settings.maintain.interval_s = 0.01
    stop = threading.Event()
    settings.ledger.url = "sqlite:////proc/none/ledger.db"
    ingest = Ingest(settings, stop, lambda: pinned_versions(settings))
    thread = threading.Thread(target=ingest.run)
    thread.start()
    end = time.monotonic() + 30
    number = 0
    while not ingest._upkeep.counts.failures and time.monotonic() < end:
        seal(settings, str(number))
        number += 1
        time.sleep(0.05)
    stop.set()
    thread.join(20)
    assert ingest._upkeep.counts.failures and ingest.counts["samples"] > 0
