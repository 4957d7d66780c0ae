"""The local stack of `tide stack` (object storage, MLflow, Dagster) with a stand-in for the SGLang server,
and samples that became windows.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.small import land, small_settings
from tests.fixtures.stand_in import StandIn, stand_in
from tide_platform.config import draft_digest
from tide_platform.control.ledger import opened
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State, window_name
from tide_platform.local import services
from tide_platform.local.graphql import Dagster
from tide_platform.local.ready import dagster_url
from tide_platform.local.stack import Stack

SAMPLES, REFERENCE = 6, 12  # of a window; of the reference set


@dataclass
class UiStack:
    stack: Stack
    server: StandIn

    @property
    def dagster(self) -> Dagster:
        return Dagster(dagster_url(self.stack.settings))

    @property
    def mlflow(self) -> str:
        return self.stack.settings.registry.tracking_uri

    def land(self, windows: int, seed: int) -> None:
        """Samples for so many windows."""
        land(self.stack.settings, windows * SAMPLES, seed)

    def window(self, number: int) -> WindowRecord | None:
        """What the ledger holds of the window with this number."""
        with opened(self.stack.settings.ledger.url) as ledger:
            every = {record.key.window: record for record in ledger.windows("demo")}
        return every.get(window_name(number))

    def wait_final(self, number: int) -> WindowRecord:
        """Waits until the window has come to its end."""
        self.wait(
            f"the end of window {number}",
            lambda: (record := self.window(number)) is not None and record.state.final,
        )
        record = self.window(number)
        assert record is not None
        return record

    def wait_final_of(self, number: int, before: State) -> State:
        """Waits until a window that was at the end ``before`` has come to another."""
        self.wait(
            f"another end of window {number} than {before}",
            lambda: (r := self.window(number)) is not None and r.state.final and r.state is not before,
        )
        return self.wait_final(number).state

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 400) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {seconds} s; {self.dagster.runs()}"
            time.sleep(1)


@contextmanager
def ui_stack(folder: Path, windows: int) -> Iterator[UiStack]:
    """Everything up, with samples for so many windows landed; the daemon has begun to cut them."""
    before = dict(os.environ)
    given = small_settings(folder, samples=SAMPLES)
    given.window.policy = "latest"  # one of many is trained by itself, the others are left to the tests
    given.window.keep_partitions = 10
    assert given.draft is not None
    with Stack(given, auto_ports=True) as stack:
        stack.open(die_with_parent=True)
        port = stack.settings.serving.port
        with stand_in(port, draft_digest(given.draft)) as server:
            stack.start([name for name in services.PLATFORM if name != services.DAEMON])
            land(stack.settings, REFERENCE, 1, "reference")
            found = UiStack(stack, server)
            found.land(windows, seed=2)
            stack.start([services.DAEMON])
            yield found
    os.environ.clear()
    os.environ.update(before)
