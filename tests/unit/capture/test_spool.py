"""The spool as a process: ends well on SIGTERM, goes on after kill -9, follows a server that restarts."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.synthetic import STREAM, assert_same, begin, finish, make_sample, send, write_rows
from tide_platform.capture.packing import pack
from tide_platform.capture.ring import Ring
from tide_platform.capture.segment import read_segment
from tide_platform.capture.split import REFERENCE_TENANT, kept_whole
from tide_platform.capture.spool import Spool, SpoolSettings
from tide_platform.capture.writer import RingWriter


class Process:
    def __init__(self, folder, ring_path):
        command = [
            sys.executable,
            "-m",
            "tide_platform.capture.spool",
            "--ring",
            ring_path,
            "--folder",
            folder,
        ]
        command += ["--segment-seconds", "0.2"]
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def end(self, number=signal.SIGTERM):
        self.popen.send_signal(number)
        _, said = self.popen.communicate(timeout=20)
        return self.popen.returncode, said


@pytest.fixture
def start(tmp_path):
    running = []

    def start():
        running.append(Process(str(tmp_path / "spool"), str(tmp_path / "ring")))
        return running[-1]

    yield start
    for process in running:
        process.popen.kill()
        process.popen.wait()


def stored(tmp_path):
    return [s for path in sorted((tmp_path / "spool").glob("*.seg")) for s in read_segment(path)[1]]


def until(condition, seconds=15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_drains_seals_and_exits_0(tmp_path, start):
    spool = start()  # before there is a ring
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer = RingWriter(ring)
    wanted = [make_sample(str(number), seed=number) for number in range(10)]
    for sample in wanted:
        assert send(writer, sample)
    until(lambda: ring.tail == ring.head)
    until(lambda: ring.spool_age() < 1)
    assert spool.end()[0] == 0
    for found, sample in zip(stored(tmp_path), wanted, strict=True):
        assert_same(found, sample)
    assert not list((tmp_path / "spool").glob("*.open"))


def test_a_killed_spool_loses_only_requests_in_flight_and_the_next_says_so(tmp_path, start):
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, spool = RingWriter(ring), start()
    done, in_flight = make_sample("done"), make_sample("in-flight", seed=1)
    send(writer, done)
    until(lambda: stored(tmp_path))
    begin(writer, in_flight)
    write_rows(writer, in_flight, 0, 6)
    until(lambda: ring.tail == ring.head)
    spool.end(signal.SIGKILL)
    write_rows(writer, in_flight, 6, 12)
    finish(writer, in_flight)
    send(writer, make_sample("meanwhile", seed=2))
    spool = start()
    until(lambda: ring.tail == ring.head)
    code, said = spool.end()
    assert code == 0
    assert [sample.meta.sample_id for sample in stored(tmp_path)] == ["done", "meanwhile"]
    assert '"spool_restarted": 1' in (tmp_path / "spool" / "spool.json").read_text()
    assert "Traceback" not in said


def test_a_torn_tail_is_cut_and_said(tmp_path, start):
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    spool = start()
    send(RingWriter(ring), make_sample("kept"))
    folder = tmp_path / "spool"
    until(lambda: any(b'"kept"' in path.read_bytes() for path in folder.glob("*.*e*")))
    spool.end(signal.SIGKILL)
    paths = list((tmp_path / "spool").glob("*.*e*"))
    (path,) = [path for path in paths if path.suffix in (".open", ".seg")]
    whole = path.read_bytes()
    path.with_suffix(".open").write_bytes(whole[: -1 if path.suffix == ".seg" else None] + b"TSEG torn")
    if path.suffix == ".seg":
        path.unlink()
    spool = start()
    until(lambda: list((tmp_path / "spool").glob("*.seg")))
    until(lambda: ring.spool_age() < 1)
    code, said = spool.end()
    assert code == 0 and "cut a torn tail" in said
    assert [sample.meta.sample_id for sample in stored(tmp_path)] == ["kept"]


def test_follows_a_server_that_restarts(tmp_path, start):
    spool = start()
    first = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer = RingWriter(first)
    send(writer, make_sample("first"))
    begin(writer, make_sample("cut-off", seed=3))
    write_rows(writer, make_sample("cut-off", seed=3), 0, 6)
    second = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    send(RingWriter(second), make_sample("second"))
    until(lambda: second.tail == second.head and first.tail == first.head)
    assert spool.end()[0] == 0
    assert [sample.meta.sample_id for sample in stored(tmp_path)] == ["first", "second"]
    assert not list(tmp_path.glob("ring.left-*"))


def test_two_spools_on_one_folder_are_refused(tmp_path, start):
    start()
    until((tmp_path / "spool" / "spool.lock").exists)
    time.sleep(0.3)
    second = start()
    _, said = second.popen.communicate(timeout=20)
    assert second.popen.returncode == 2 and "another spool" in said


def test_everything_is_readable_by_its_owner_alone(tmp_path, start):
    (tmp_path / "spool").mkdir(mode=0o755)
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    start()
    assert send(RingWriter(ring), make_sample("a"))
    until(lambda: stored(tmp_path) and (tmp_path / "spool" / "spool.json").exists())
    paths = [tmp_path / "ring", *(tmp_path / "spool").iterdir()]
    assert {path.suffix for path in paths} >= {".seg", ".json", ".lock", ".journal"}
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert (tmp_path / "spool").stat().st_mode & 0o777 == 0o700


def test_packs_training_rows_and_keeps_the_others(tmp_path):
    settings = SpoolSettings(aux_format="int8", validation_share=0.5)
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, spool = RingWriter(ring), Spool(tmp_path / "ring", tmp_path / "spool", settings)
    wanted = {str(number): make_sample(str(number), seed=number) for number in range(30)}
    wanted["reference"] = make_sample("reference", tenant=REFERENCE_TENANT)
    for sample in wanted.values():
        assert send(writer, sample)
    while ring.tail != ring.head:
        spool.step()
    spool.close()
    found = {sample.meta.sample_id: sample for sample in stored(tmp_path)}
    assert found.keys() == wanted.keys()
    formats = {name: sample.meta.aux_format for name, sample in found.items()}
    assert set(formats.values()) == {"bf16", "int8"} and formats["reference"] == "bf16"
    for name, sample in wanted.items():
        whole = kept_whole(sample.meta.request_id, sample.meta.tenant, 0.5)
        assert_same(found[name], sample if whole else pack(sample, "int8"))


def test_the_status_tells_what_spool_and_ring_lost(tmp_path):
    ring = Ring.create(tmp_path / "ring", 1 << 20, STREAM)
    writer, now = RingWriter(ring), [5.0]
    spool = Spool(tmp_path / "ring", tmp_path / "spool", SpoolSettings(), clock=lambda: now[0])
    assert send(writer, make_sample("a"))
    begin(writer, make_sample("gone"))
    write_rows(writer, make_sample("gone"), 0, 3)
    writer.discard("r-gone", "aborted")
    writer.discard("r-never", "opt_out")
    while ring.tail != ring.head:
        spool.step()
    spool.close()
    status = json.loads((tmp_path / "spool" / "spool.json").read_text())
    assert status["ring_dropped"] == {"aborted": 1, "opt_out": 1} and status["dropped"] == {}
    assert (status["samples"], status["segments"], status["at"]) == (1, 1, 5.0)
    assert status["bytes"] == sum(path.stat().st_size for path in (tmp_path / "spool").glob("*.seg"))
