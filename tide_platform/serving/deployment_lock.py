"""One deployer at a time."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tide_platform.config import Settings, TideError
from tide_platform.config.locks import LockHeld, locked

LOCK_WAIT_S = 60.0


class DeploymentBusy(TideError):
    """Another process deploys."""

    def __init__(self, path: Path):
        super().__init__(
            f"{path} was locked for {LOCK_WAIT_S:.0f} s: another process deploys; try again after it"
        )
        self.path = path


@contextmanager
def deployment_lock(settings: Settings) -> Iterator[None]:
    """One deployer at a time for this deployment; the lock goes with its process. Raises
    :class:`DeploymentBusy`.
    """
    path = settings.state / f"deploy-{settings.deployment}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, wait_seconds=LOCK_WAIT_S))
        except LockHeld as error:
            raise DeploymentBusy(path) from error
        yield
