"""One committer a dataset."""

import fcntl
import os
from pathlib import Path

from tide_platform.config import TideError

LOCK_FILE = "ingest.lock"


class IngestRunning(TideError):
    """A second ingest on one spool folder."""

    def __init__(self, folder: Path, holder: str):
        super().__init__(
            f"{folder}: another ingest (process {holder or '?'}) commits from there; stop it first"
        )
        self.folder, self.holder = folder, holder


class Lease:
    """A lock on the spool folder, held until the process ends however it ends.

    It keeps two ingests of one machine apart. Two machines have two spool folders; that their commits do
    not hurt each other is Lance's doing (conditional puts), and their samples differ.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / LOCK_FILE).open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise IngestRunning(folder, holder) from error
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()
