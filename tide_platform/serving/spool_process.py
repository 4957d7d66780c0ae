"""The spool beside a server: the process that drains its ring."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tide_platform.config import Settings
from tide_platform.serving.launch import LaunchPlan
from tide_platform.serving.processes import end_tree, start_child

PATIENCE_S = 30.0  # to drain the ring and seal
# users' tokens go first: what the spool lacks for a while waits in the ring. It keeps a tenth of a core, and
# packing takes a twentieth
NICE = 10


class Spool:
    """Started again whenever it dies."""

    def __init__(self, settings: Settings, plan: LaunchPlan, say: Callable[[str], None]):
        assert plan.spool_argv is not None
        self.argv = [sys.executable, *plan.spool_argv]
        self.log = settings.state / "logs" / "spool.log"
        self.say = say
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0

    def start(self) -> None:
        self.process = start_child(self.argv, self.log, {}, on_parent_death=signal.SIGTERM, nice=NICE)

    def keep_alive(self) -> None:
        """Restart it if it died, at once at first, then ever more slowly (30 s at most)."""
        assert self.process is not None
        status = self.process.poll()
        if status is None or time.monotonic() < self._next_start:
            return
        self.restarts += 1
        self._next_start = time.monotonic() + min(30.0, 0.5 * 2**self.restarts)
        self.say(f"the spool ended by itself (status {status}); restart {self.restarts}; log {self.log}")
        self.start()

    def end(self) -> None:
        if self.process is None:
            return
        end_tree(self.process, [], PATIENCE_S)
        if self.process.returncode:
            self.say(f"the spool ended with status {self.process.returncode}; log {self.log}")
