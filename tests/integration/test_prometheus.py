"""A real Prometheus scrapes a real exporter of a deployment with content: its alerts fire, and every query of
the dashboards is answered.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import insert

from tests.fixtures.watched import fill
from tests.free_ports import free_ports
from tests.synthetic import STREAM, make_sample
from tests.unit.metrics.promql import PROMETHEUS, dashboards, names, queries
from tide_platform.capture.folder import write_status
from tide_platform.config import Settings, dump_settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.tables import controls
from tide_platform.metrics.catalogue import CATALOGUE
from tide_platform.store.hidden_states import open_store
from tide_platform.training.progress import Journal, StepRecord

pytestmark = pytest.mark.integration

TIDE = [sys.executable, "-c", "from tide_platform.cli import main; main()"]
# of the exporter's, these are absent where all is well or nothing is lost
ABSENT = {"tide_spool_ring_dropped_total"}


@dataclass(frozen=True)
class Watch:
    """``api(path, **parameters)`` asks Prometheus; ``status`` is what the only server says."""

    settings: Settings
    exporter: str
    api: Callable[..., Any]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self.api("query", query=expression)["result"]

    def firing(self) -> set[str]:
        return {
            each["labels"]["alertname"] for each in self.api("alerts")["alerts"] if each["state"] == "firing"
        }


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """What answers `/tide/status` as a server does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                b'{"draft_digest": "new", "adapter": "0.5.14", "verify_rule": "greedy", "reloads": 1, '
                b'"capture": {"enabled": true}}'
            )

        def log_message(self, format: str, *args: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory, server: str) -> Iterator[Watch]:
    folder = tmp_path_factory.mktemp("watch")
    settings = Settings(state=folder / "state")
    settings.storage.uri, settings.ledger.url = str(folder / "store"), f"sqlite:///{folder}/ledger.db"
    settings.rollout.servers = [server]
    settings.metrics.port, port = free_ports(2)
    settings.metrics.interval_seconds = 0.5
    deploy(settings)
    (folder / "tide.yaml").write_text(dump_settings(settings))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDE_")}
    exporter = subprocess.Popen(
        [*TIDE, "metrics", "--config", str(folder / "tide.yaml")],
        env=environment | {"TIDE_ADMIN_KEY": "key"},
        stderr=(folder / "exporter.log").open("wb"),
    )
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(settings)))
    prometheus = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=(folder / "prometheus.log").open("wb"),
    )

    def api(path: str, **parameters: str) -> Any:
        reply = httpx.get(f"http://127.0.0.1:{port}/api/v1/{path}", params=parameters, timeout=10).json()
        assert reply["status"] == "success", (parameters, reply)
        return reply["data"]

    made = Watch(settings, f"http://127.0.0.1:{settings.metrics.port}/metrics", api)
    try:
        wait(lambda: made.query("tide_up{what='dataset'} == 1"), folder / "exporter.log")
        yield made
    finally:
        prometheus.kill()
        exporter.send_signal(signal.SIGTERM)
        prometheus.wait(20)
    assert exporter.wait(20) == 0


def deploy(settings: Settings) -> None:
    """A deployment of which every part has something to tell."""
    now = time.time()
    ledger = Ledger(settings.ledger.url)
    fill(ledger, now)
    with ledger._database.write() as db:
        db.execute(insert(controls).values(deployment="demo", name="speedup", value={"8": 0.9}, at=now))
    ledger.close()
    store = open_store(settings)
    store.ensure(STREAM)
    store.append([make_sample("one"), make_sample("two")], ["x"])
    settings.spool_folder.mkdir(parents=True)
    (settings.spool_folder / "00.seg").write_bytes(b"x" * 1000)
    spool = {"samples": 1, "segments": 1, "bytes": 9, "disk_errors": 0, "dropped": {"spool_full": 4}}
    write_status(settings.spool_folder / "spool.json", {"at": now, "ring_dropped": {}} | spool)
    ingest = {"at": now - 3600, "samples": 1, "upkeep_compactions": 1}  # dead for an hour
    write_status(settings.spool_folder / "ingest.json", ingest)
    journal = Journal(settings.state / "work" / "demo-w00003" / "run" / "steps.jsonl")
    journal.append(StepRecord(1, 9, 0, 1.5, [1.5], [0.2], 1e-3, 0.7, 8, 100, 4.0, 0.5, 3.5))
    journal.close()


def configuration(settings: Settings) -> dict[str, Any]:
    """The project's own, quicker, and with nothing to wait for before an alert fires."""
    given = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    given["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    given["scrape_configs"][0]["scrape_timeout"] = "1s"
    given["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{settings.metrics.port}"]
    given["scrape_configs"] = given["scrape_configs"][:1]
    rules = yaml.safe_load((PROMETHEUS / "rules" / "tide.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    path = settings.state.parent / "rules.yml"
    path.write_text(yaml.safe_dump(rules))
    return given | {"rule_files": [str(path)]}


def wait(ready: Callable[[], Any], log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if ready():
                return
        except httpx.TransportError:
            pass  # it is starting
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.3)


def test_every_metric_of_the_exporter_arrives(watch: Watch):
    text = httpx.get(watch.exporter).text
    told = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert set(CATALOGUE) - told == ABSENT
    assert {each["metric"]["what"]: each["value"][1] for each in watch.query("tide_up")} == {
        part: "1" for part in watch.settings.metrics.parts
    }
    assert watch.query('tide_server_info{deployment="demo",draft="new"}')


def test_alerts_fire(watch: Watch):
    expected = {"TideIngestDead", "TideSpeedupBelowOne", "TideSamplesDropped"}
    wait(lambda: watch.firing() >= expected, watch.settings.state.parent / "prometheus.log")
    quiet = {"TideExporterDown", "TideBlind", "TideServerDown", "TideServersDisagree", "TideSpoolNearBudget"}
    assert not watch.firing() & quiet
    (labels,) = [
        each["labels"]
        for each in watch.api("alerts")["alerts"]
        if each["labels"]["alertname"] == "TideIngestDead"
    ]
    assert labels["deployment"] == "demo" and labels["severity"] == "critical"


@pytest.mark.parametrize("name", dashboards())
def test_every_query_of_the_dashboards_is_answered(watch: Watch, name: str):
    """With a value, where the exporter alone can give one; a rate needs a change."""
    for query in queries(dashboards()[name]):
        found = watch.query(query)
        if names(query) <= set(CATALOGUE) and not any(word in query for word in ("rate(", "increase(")):
            assert found, query


def test_a_part_that_goes_is_told_of_and_alerts(watch: Watch):
    """Last: the deployment's spool is gone afterwards."""
    watch.settings.spool_folder.rename(watch.settings.state / "gone")
    wait(lambda: "TideBlind" in watch.firing(), watch.settings.state.parent / "prometheus.log")
    blind = watch.query("tide_up == 0")
    assert [each["metric"]["what"] for each in blind] == ["files"]
    # what is not known is absent; Prometheus forgets it with the next scrape
    assert watch.query("tide_spool_segments") == [] and watch.query("tide_dataset_rows")


def test_a_port_that_is_taken_is_named(watch: Watch):
    refused = subprocess.run(
        [*TIDE, "metrics", "--port", str(watch.settings.metrics.port)], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "metrics.port" in refused.stderr
