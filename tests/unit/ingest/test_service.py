"""``tide ingest`` on a local folder."""

import threading
import time

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings
from tide_platform.ingest.lease import IngestRunning, Lease
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


def test_a_second_ingest_is_refused(settings):
    lease = Lease(settings.spool_folder)
    with pytest.raises(IngestRunning, match=r"another ingest \(process \d+\)"):
        Ingest(settings)
    lease.release()
    Ingest(settings).run(once=True)


def test_a_store_that_fails_for_a_while_loses_nothing(settings, monkeypatch, caplog):
    path, ingest, tries = seal(settings, "a"), Ingest(settings), []
    real = ingest._committer.commit

    def flaky(paths):
        tries.append(path.exists())
        if len(tries) < 3:
            raise StoreUnavailable("s3://x", "connection refused")
        real(paths)

    monkeypatch.setattr(ingest._committer, "commit", flaky)
    ingest.run(once=True)
    assert tries == [True, True, True] and open_store(settings).tip().rows == 1
    assert caplog.text.count("nothing is lost") == 1, "said once a period"


def test_once_gives_up_with_the_error_when_the_store_stays_down(settings, monkeypatch):
    path, ingest = seal(settings, "a"), Ingest(settings)

    def down(paths):
        raise StoreUnavailable("s3://x", "connection refused")

    monkeypatch.setattr(ingest._committer, "commit", down)
    monkeypatch.setattr("tide_platform.ingest.service._ATTEMPTS_ONCE", 2)
    with pytest.raises(StoreUnavailable, match="connection refused"):
        ingest.run(once=True)
    assert path.exists()
