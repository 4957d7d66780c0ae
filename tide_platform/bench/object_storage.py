"""An object storage of its own for a benchmark: SeaweedFS as the local stack runs it, gone with the block."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tide_platform.config import Settings, TideError
from tide_platform.config.schema import Storage
from tide_platform.local.layout import Layout
from tide_platform.local.ports import inner_ports, with_free_ports
from tide_platform.local.secrets import load_secrets, write_identities
from tide_platform.local.services import STORAGE, services, stack_settings
from tide_platform.serving.child import stub

READY_S = 60.0


class StorageMissing(TideError):
    """The benchmark's object storage did not come up."""

    def __init__(self, log: Path):
        super().__init__(f"the object storage of the benchmark did not come up; its log: {log}")
        self.log = log


@contextmanager
def object_storage(folder: Path) -> Iterator[Storage]:
    """Its data below ``folder``; keys in this process's environment while it lasts.

    Raises :class:`StorageMissing`.
    """
    settings = stack_settings(with_free_ports(Settings(state=folder)))
    layout = Layout(settings.state)
    layout.make()
    keys = load_secrets(layout)
    write_identities(layout, keys)
    (service,) = (each for each in services(settings, layout, inner_ports(settings)) if each.name == STORAGE)
    log = layout.log(STORAGE)
    former = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    with log.open("wb") as file:
        argv = [*stub(signal.SIGKILL), *service.argv]
        process = subprocess.Popen(argv, stdout=file, stderr=file, cwd=folder)
    try:
        _wait(settings.storage.endpoint or "", log, process)
        yield settings.storage
    finally:
        process.kill()  # asked to end, it waits for its own inner connections
        process.wait(30)
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait(endpoint: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(endpoint, timeout=2)
            return
        except urllib.error.HTTPError:
            return  # it answers: not allowed without keys
        except OSError:
            time.sleep(0.2)
    raise StorageMissing(log)
