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

    def __init__(self, path: Path, waited_s: float):
        super().__init__(
            f"{path} was locked for {waited_s:.0f} s: another process deploys; try again after it"
        )
        self.path = path


@contextmanager
def deployment_lock(settings: Settings, wait_s: float | None = None) -> Iterator[None]:
    """One deployer at a time for this deployment; the lock goes with its process. ``wait_s``: None waits
    :data:`LOCK_WAIT_S`. Raises :class:`DeploymentBusy`.
    """
    wait_s = LOCK_WAIT_S if wait_s is None else wait_s
    path = settings.state / f"deploy-{settings.deployment}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path, wait_seconds=wait_s))
        except LockHeld as error:
            raise DeploymentBusy(path, wait_s) from error
        yield
