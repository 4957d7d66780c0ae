"""Users: captured requests of one workload after the other, without an end."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tide_platform.local.errors import StackError
from tide_platform.local.soak.plan import CONCURRENCY, NEW_TOKENS
from tide_platform.serving.traffic import run_traffic
from tide_platform.serving.workloads import TRAFFIC, Prompt, load_workload


class UsersFailed(StackError):
    """Requests failed; users must not notice anything of the loop."""

    def __init__(self, workload: str, errors: Sequence[str]):
        super().__init__(f"{len(errors)} requests of {workload} failed, the first: {errors[0]}")
        self.workload, self.errors = workload, list(errors)


class Users:
    """Send prompts in a thread of its own, a batch at a time; tenant: the workload's name.

    Prompts are sent in order, each once, over again where a workload has no more.
    """

    def __init__(self, base_url: str, target: Path, concurrency: int = CONCURRENCY):
        self._base_url, self._target, self._concurrency = base_url, target, concurrency
        self._size = 4 * concurrency  # of a batch
        self._prompts: dict[str, list[Prompt]] = {}
        self._next: dict[str, int] = {}
        self.sent = 0  # requests that were answered
        self._workload: str | None = None
        self._busy = threading.Lock()  # held while a batch is sent
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(1, "users")
        self._running = self._pool.submit(self._run)

    def close(self) -> None:
        self._ended.set()
        self._pool.shutdown()

    def want(self, workload: str | None) -> None:
        """From the next batch on; None: nothing. Returns when the batch before has ended. Raises what
        :meth:`check` does.
        """
        with self._busy:
            self._workload = workload
        self.check()

    def send(self, workload: str, count: int) -> None:
        """So many requests now, by the caller's own thread, where nothing else is wanted."""
        assert self._workload is None
        while count > 0:
            self._batch(workload, min(self._size, count))
            count -= self._size

    def check(self) -> None:
        """Raises :class:`UsersFailed`, or what else ended the thread."""
        if self._running.done():
            self._running.result()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._busy:
                if self._workload is not None:
                    self._batch(self._workload, self._size)
            time.sleep(0.5)

    def _batch(self, workload: str, count: int) -> None:
        if workload not in self._prompts:
            self._prompts[workload] = load_workload(workload, TRAFFIC)
        prompts, first = self._prompts[workload], self._next.get(workload, 0)
        self._next[workload] = first + count
        chosen = [prompts[(first + number) % len(prompts)] for number in range(count)]
        report = run_traffic(
            self._base_url,
            chosen,
            self._target,
            concurrency=self._concurrency,
            max_new_tokens=NEW_TOKENS,
            capture=True,
            tenant=workload,
        )
        self.sent += report.requests
        if report.errors:
            raise UsersFailed(workload, report.errors)
