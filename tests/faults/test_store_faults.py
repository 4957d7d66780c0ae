"""A store that is slow, answers 500 or 503, or loses answers: nothing is lost, nothing is stored twice."""

import threading
import time

import pytest
from fault_proxy import FaultProxy
from ingest_faults import Producer, assert_exactly_once

from tests.free_ports import free_port
from tests.integration.seaweed import s3_storage, seaweed  # noqa: F401 (fixtures)
from tests.synthetic import STREAM, make_sample
from tide_platform.config import Settings
from tide_platform.ingest.service import Ingest
from tide_platform.store.errors import StoreError, StoreUnavailable
from tide_platform.store.hidden_states import open_store
from tide_platform.store.objects import ObjectStore
from tide_platform.store.upkeep import Upkeep

FAST = {"commit_seconds": 0, "poll_seconds": 0.02, "lease_seconds": 2.0}


@pytest.mark.parametrize(("kind", "share"), [("slow", 0.3), ("500", 0.15), ("503", 0.15), ("lost", 0.1)])
def test_faults_while_two_workers_store(tmp_path, s3_storage, seaweed, kind, share):  # noqa: F811
    proxy = FaultProxy(free_port(), seaweed.port, seed=11)
    storage = {"uri": s3_storage.uri, "endpoint": f"http://127.0.0.1:{proxy.port}"}
    settings = Settings(storage=storage, state=tmp_path, ingest=FAST, maintain={"interval_s": 1})
    producer = Producer(settings.spool_folder, seed=5, pause=0.1)
    stop = threading.Event()
    workers = [Ingest(settings, stop) for _ in range(2)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    try:
        producer.start()
        for thread in threads:
            thread.start()
        _until(lambda: sum(worker.counts["samples"] for worker in workers) > 0)
        proxy.kind, proxy.share = kind, share
        time.sleep(6)
        producer.stop()
        assert proxy.injected > 5, "the faults were met"
        proxy.share = 0.0
        _until(lambda: not list(settings.spool_folder.glob("*.seg")))
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        proxy.close()
    assert not any(thread.is_alive() for thread in threads)
    settings.storage.endpoint = seaweed.endpoint
    assert_exactly_once(settings, producer.sealed)


@pytest.mark.parametrize("where", ["local", "s3"])
def test_upkeep_under_load_with_a_pinned_window(tmp_path, where, request):
    storage = request.getfixturevalue("s3_storage").model_dump() if where == "s3" else None
    storage = storage or {"uri": str(tmp_path / "store")}
    settings = Settings(storage=storage, state=tmp_path, maintain={"keep_hours": 1.5e-3, "max_fragments": 32})
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    store = open_store(settings)
    store.ensure(STREAM)
    for number in range(12):
        store.append([make_sample(f"p{number}", 300, seed=number, tenant="ab"[number % 2])], [f"p{number}"])
    pinned, window = store.tip().version, store.refs()
    end, names, failed = threading.Event(), [], []

    def append() -> None:
        own = open_store(settings)
        try:
            while not end.is_set():
                name = f"n{len(names)}"
                try:
                    own.append([make_sample(name, 300, tenant="ab"[len(names) % 2])], [name])
                except StoreUnavailable:  # slower than keep_hours, say: as ingest does, look and try again
                    if name not in own.sample_ids():
                        continue
                names.append(name)
        except StoreError as error:
            failed.append(error)

    appender = threading.Thread(target=append)
    appender.start()
    upkeep = Upkeep(settings, open_store(settings), objects, lambda: {pinned})
    until = time.monotonic() + 8
    passes = 0
    while time.monotonic() < until:
        passes += upkeep.run(0.5, everything=True)
        assert len(list(store.load(window, pinned))) == 12, "its reader sees nothing of it"
    end.set()
    appender.join(60)
    upkeep.run(everything=True)
    assert not failed and passes > 3 and upkeep.counts.compactions > 3 and upkeep.counts.versions_removed > 20
    found = sorted(ref.sample_id for ref in store.refs())
    assert found == sorted([*names, *(f"p{number}" for number in range(12))]) and len(names) > 20
    assert len(list(store.load(found))) == len(found)
    assert len(store.handle.require().get_fragments()) <= 32


def _until(condition, seconds=90.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
