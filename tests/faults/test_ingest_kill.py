"""Exactly once, whatever dies or stands still when: two workers, one of them the committer, with upkeep."""

import time

from ingest_faults import Producer, assert_exactly_once, ingest, kill_in_a_loop, until_committed

from tests.integration.seaweed import s3_storage, seaweed  # noqa: F401 (fixtures)
from tide_platform.config import Settings, dump_settings

FAST = {
    "ingest": {"commit_seconds": 0, "poll_seconds": 0.02, "lease_seconds": 1.0, "read_back_share": 0.2},
    "maintain": {"interval_s": 0.5, "keep_hours": 0.001},
}


def test_on_a_local_folder(tmp_path):
    settings = Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path, **FAST)
    settings.ledger.url = f"sqlite:///{tmp_path / 'ledger.db'}"
    log = kill_in_a_loop(settings, kills=12, pauses=3, seed=20)
    assert "Traceback" not in log


def test_on_s3(tmp_path, s3_storage):  # noqa: F811
    settings = Settings(storage=s3_storage.model_dump(), state=tmp_path, **FAST)
    settings.ledger.url = f"sqlite:///{tmp_path / 'ledger.db'}"
    log = kill_in_a_loop(settings, kills=6, pauses=2, seed=7)
    assert "Traceback" not in log


def test_two_folders_on_one_dataset(tmp_path):
    """As on two machines: each its own spool and worker, one dataset; one worker is killed on its way."""
    sites = [
        Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path / name, **FAST)
        for name in ("one", "two")
    ]
    producers, workers = [], []
    for number, site in enumerate(sites):
        site.ledger.url = f"sqlite:///{tmp_path / 'ledger.db'}"
        site.state.mkdir()
        (site.state / "tide.yaml").write_text(dump_settings(site))
        producers.append(Producer(site.spool_folder, number, 0.05, prefix=f"m{number}-"))
        producers[-1].start()
        workers.append(ingest(site.state / "tide.yaml", log=site.state / "log"))
    for _ in range(2):
        until_committed(sites[0].state / "log", 20)
        time.sleep(1)
    workers[0].kill()
    time.sleep(1)
    for producer in producers:
        producer.stop()
    for worker in workers:
        worker.terminate()
        worker.wait(60)
    for site in sites:
        assert ingest(site.state / "tide.yaml", "--once", log=site.state / "log").wait(60) == 0
    assert_exactly_once(sites[0], [name for producer in producers for name in producer.sealed])
    assert not list(sites[1].spool_folder.glob("*.seg"))
