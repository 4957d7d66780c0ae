"""A tiny producer, and ingest workers that are killed and paused at random; seeded."""

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.synthetic import STREAM, make_sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings, dump_settings
from tide_platform.store.hidden_states import open_store

_RUN = "import typer; from tide_platform.cli.ingest import command; typer.run(command)"


class Producer(threading.Thread):
    """Seals a segment of 1 to 4 samples every ``pause`` seconds until told to stop."""

    def __init__(self, folder: Path, seed: int, pause: float, prefix: str = "s"):
        super().__init__(daemon=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.sealed: list[str] = []
        self._folder, self._random, self._pause = folder, random.Random(seed), pause
        self._prefix, self._end = prefix, threading.Event()

    def run(self) -> None:
        while not self._end.wait(self._pause):
            segment = SegmentWriter(self._folder, STREAM)
            ids = [
                f"{self._prefix}{len(self.sealed) + number}" for number in range(self._random.randint(1, 4))
            ]
            for sample_id in ids:
                tenant = self._random.choice(["a", "b"])
                segment.append(make_sample(sample_id, self._random.randint(2, 400), tenant=tenant))
            segment.seal()
            self.sealed += ids

    def stop(self) -> None:
        self._end.set()
        self.join()


def ingest(config: Path, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", _RUN, "--config", str(config), *arguments], stdout=file, stderr=file
        )


def kill_in_a_loop(settings: Settings, kills: int, pauses: int, seed: int) -> str:
    """Two workers on one folder, with upkeep; ``kills`` times one of them is killed shortly after something
    was committed and replaced, ``pauses`` times one stands still for longer than its lease. A last one
    finishes; then every sealed sample is in the dataset exactly once. Returns what the processes logged.
    """
    rng, producer = random.Random(seed), Producer(settings.spool_folder, seed, pause=0.05)
    config, log = settings.state / "tide.yaml", settings.state / "ingest.log"
    config.write_text(dump_settings(settings))
    producer.start()
    workers = [ingest(config, log=log) for _ in range(2)]
    plan = ["kill"] * kills + ["pause"] * pauses
    rng.shuffle(plan)
    for what in plan:
        until_committed(log, 20)
        time.sleep(rng.uniform(0, 0.4))
        index = rng.randrange(2)
        if what == "kill":
            workers[index].send_signal(signal.SIGKILL)
            workers[index].wait(10)
            workers[index] = ingest(config, log=log)
        else:
            workers[index].send_signal(signal.SIGSTOP)
            time.sleep(1.5 * settings.ingest.lease_seconds)
            workers[index].send_signal(signal.SIGCONT)
    producer.stop()
    for worker in workers:
        worker.send_signal(signal.SIGKILL if rng.random() < 0.5 else signal.SIGTERM)
    for worker in workers:
        worker.wait(60)
    last = ingest(config, "--once", log=log)
    assert last.wait(120) == 0, log.read_text()[-3000:]
    assert_exactly_once(settings, producer.sealed)
    return log.read_text()


def assert_exactly_once(settings: Settings, sealed: list[str]) -> None:
    store = open_store(settings)
    found = [ref.sample_id for ref in store.refs()]
    assert len(found) == len(set(found)), "a sample was stored twice"
    assert set(found) == set(sealed), "samples were lost, or came from nowhere"
    assert not list(settings.spool_folder.glob("*.seg"))
    assert len(list(store.load(found))) == len(found), "every checksum is right"


def until_committed(log: Path, seconds: float) -> None:
    end, before = time.monotonic() + seconds, log.read_text().count("committed")
    while log.read_text().count("committed") == before and time.monotonic() < end:
        time.sleep(0.01)
