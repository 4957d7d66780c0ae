"""Where the local stack keeps its files, all below ``settings.state``."""

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

# sun_path holds 108 bytes, supervisor binds a temporary name of about 12 more characters first
_LONGEST_SOCKET = 90


@dataclass(frozen=True)
class Layout:
    """The files of one stack; ``state`` is absolute."""

    state: Path

    @property
    def stack(self) -> Path:
        return self.state / "stack"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def config(self) -> Path:
        """The settings that every service reads (``TIDE_CONFIG``)."""
        return self.stack / "config.yaml"

    @property
    def secrets(self) -> Path:
        return self.state / "secrets.env"

    @property
    def supervisor_config(self) -> Path:
        return self.stack / "supervisord.conf"

    @property
    def supervisor_pid(self) -> Path:
        return self.stack / "supervisord.pid"

    @property
    def lock(self) -> Path:
        return self.stack / "lock"

    @property
    def identities(self) -> Path:
        """Who may use the object storage (SeaweedFS's format)."""
        return self.stack / "s3.json"

    @property
    def workspace(self) -> Path:
        return self.stack / "workspace.yaml"

    @property
    def dagster_home(self) -> Path:
        return self.state / "dagster"

    @property
    def objects(self) -> Path:
        """The object storage's volumes."""
        return self.state / "objects"

    @property
    def mlflow_database(self) -> Path:
        return self.state / "mlflow.db"

    @property
    def demo(self) -> Path:
        return self.state / "demo"

    @property
    def sockets(self) -> Path:
        """Folder of the unix sockets: below the state, or a short private one where that path is too long."""
        if len(str(self.stack)) + len("/supervisor.sock") <= _LONGEST_SOCKET:
            return self.stack
        name = hashlib.sha256(str(self.state).encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"tide-{os.getuid()}-{name}"

    @property
    def supervisor_socket(self) -> Path:
        return self.sockets / "supervisor.sock"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def make(self) -> None:
        """Create the folders; those that hold keys or sockets are for this user only."""
        for folder in (self.state, self.logs, self.dagster_home, self.objects, self.demo):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in (self.stack, self.sockets):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)

    def forget(self) -> None:
        """Remove all that an earlier stack left, ledger, samples and drafts with it; the lock stays."""
        for path in [*self.state.iterdir(), *self.stack.iterdir()]:
            if path in (self.stack, self.lock):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
