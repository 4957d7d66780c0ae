"""kill -9 of a real SGLang, its spool, `tide serve` and ingest while requests run: nothing sealed is lost."""

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from ingest_faults import ingest

from tests.integration.test_serve import TINY, Serve
from tide_platform.capture.segment import read_segment
from tide_platform.capture.spool import STATUS_FILE, sealed_segments
from tide_platform.config import dump_settings
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.serving.client import ServerRefused, ServerUnreachable
from tide_platform.serving.processes import tree
from tide_platform.store.hidden_states import open_store

pytestmark = pytest.mark.integration


class Watch(threading.Thread):
    """Sees every segment that is sealed, before ingest deletes it, and what each spool counted."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.sealed: dict[str, str] = {}  # sample id -> request id
        self.counted: dict[int, Counter[str]] = {}  # the spool's process -> its newest counts
        self._folder, self._seen, self._end = folder, set[str](), threading.Event()

    def look(self) -> None:
        for path in sealed_segments(self._folder):
            if path.name not in self._seen:
                try:
                    samples = read_segment(path)[1]
                except FileNotFoundError:
                    continue
                self._seen.add(path.name)
                self.sealed |= {sample.meta.sample_id: sample.meta.request_id for sample in samples}
        status = self._folder / STATUS_FILE
        if status.exists():
            found = json.loads(status.read_text())
            self.counted[found["pid"]] = Counter(found["dropped"])

    def run(self) -> None:
        while not self._end.wait(0.02):
            self.look()

    def stop(self) -> None:
        self._end.set()
        self.join()


class Clients:
    """Threads that ask on and on, whatever answers; each request has an id of its own."""

    def __init__(self, serving: Serve, name: str):
        self.answered: set[str] = set()
        self._serving, self._name, self._end = serving, name, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(3)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        rng = random.Random(number)
        with self._serving.client() as client:
            for order in range(10_000):
                rid = f"{self._name}-{number}-{order}"
                prompt = [rng.randrange(64, 192) for _ in range(rng.randint(4, 40))]
                try:
                    client.generate(prompt, max_new_tokens=rng.randint(2, 40), rid=rid)
                    self.answered.add(rid)
                except (ServerRefused, ServerUnreachable):
                    time.sleep(0.05)
                if self._end.is_set():
                    return

    def stop(self) -> set[str]:
        self._end.set()
        for thread in self._threads:
            thread.join(60)
        return self.answered


def scheduler(serving: Serve) -> psutil.Process:
    return next(p for p in tree(serving.process.pid) if "sglang::sched" in " ".join([p.name(), *p.cmdline()]))


def test_kills_while_requests_run(tmp_path):
    rng = random.Random(7)
    draft = tmp_path / "tiny"
    save_draft(draft, new_draft(load_target_parts(TINY), np.arange(64, 192), seed=0), {"made_by": "test"})
    serving = Serve(tmp_path, draft)
    serving.wait_ready()
    watch = Watch(serving.settings.spool_folder)
    watch.start()
    own = serving.settings.model_copy(deep=True)
    own.storage.uri = str(tmp_path / "store")
    config, log = tmp_path / "ingest.yaml", own.state / "ingest.log"
    config.write_text(dump_settings(own))
    worker = ingest(config, log=log)
    answered: set[str] = set()
    for life, victim in enumerate(["spool", "scheduler", "spool", "serve"]):
        clients = Clients(serving, f"life{life}")
        time.sleep(rng.uniform(1.0, 3.0))
        if victim == "spool":
            before = serving.output.read_text().count("the spool ended")
            serving.spool().kill()
            while serving.output.read_text().count("the spool ended") == before:
                time.sleep(0.1)
            worker.kill()
            worker.wait()
            worker = ingest(config, log=log)
            time.sleep(rng.uniform(0.5, 1.5))
            answered |= clients.stop()
            continue
        serving.members = tree(serving.process.pid)
        (scheduler(serving) if victim == "scheduler" else serving.process).kill()
        serving.process.wait(60)
        answered |= clients.stop()
        serving.assert_nothing_left()
        if victim == "scheduler":
            serving = Serve(tmp_path, draft)
            serving.wait_ready()
    worker.kill()
    worker.wait()
    watch.look()
    watch.stop()
    assert ingest(config, "--once", log=log).wait(120) == 0
    stored = open_store(own).refs()
    ids = [ref.sample_id for ref in stored]
    assert len(ids) == len(set(ids)), "a sample was stored twice"
    assert set(ids) == watch.sealed.keys(), "a sealed sample was lost, or one came from nowhere"
    assert len(answered) > 20, "the clients were served between the kills"
    lost = answered - {ref.request_id for ref in stored}
    counted = sum((counts for counts in watch.counted.values()), Counter())
    assert len(lost) <= counted.total(), (lost, counted)
    assert not list(serving.settings.spool_folder.glob("*.seg"))
    assert not list(serving.settings.spool_folder.glob("*.open"))
