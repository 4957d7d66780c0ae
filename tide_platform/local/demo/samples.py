"""Captured samples on their way into the dataset: what waits, what has landed, what was lost."""

import json
import time
from collections.abc import Callable, Sequence

from tide_platform.capture.spool import STATUS_FILE
from tide_platform.config import Settings
from tide_platform.control.ledger import Ledger
from tide_platform.control.windows import REFERENCE_TENANT
from tide_platform.local.demo.measure import Bench
from tide_platform.local.demo.plan import NEW_TOKENS
from tide_platform.local.errors import StackError
from tide_platform.serving.client import SglangClient
from tide_platform.serving.traffic import TrafficReport
from tide_platform.serving.workloads import Prompt

LAND_TIMEOUT_S = 60.0


class NotLanded(StackError):
    """Captured samples did not reach the dataset."""

    def __init__(self, tenant: str, landed: int, wanted: int, seconds: float):
        super().__init__(
            f"{landed} of {wanted} {tenant} samples reached the dataset within {seconds:.0f} s; "
            "see .tide/logs/ingest.log and .tide/logs/spool.log"
        )
        self.tenant, self.landed, self.wanted = tenant, landed, wanted


class NothingCut(StackError):
    """The sensor cut no window although the traffic was sent."""

    def __init__(self, settings: Settings, seconds: float, sensor: str):
        landed = count_samples(settings, f"tenant != '{REFERENCE_TENANT}'")
        super().__init__(
            f"no window was cut within {seconds:.0f} s: {landed} samples are in the dataset, a window needs "
            f"{settings.window.min_samples} new ones; the sensor: {sensor}; see .tide/logs"
        )


def captured_traffic(
    bench: Bench, prompts: Sequence[Prompt], who: str, concurrency: int, tenant: str, phase: str | None = None
) -> TrafficReport:
    """Send prompts that are to be captured."""
    return bench.send(who, prompts, concurrency, NEW_TOKENS, phase or tenant, tenant=tenant)


def count_samples(settings: Settings, where: str) -> int:
    """Rows of the dataset that match; 0 where there is no dataset yet."""
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    return len(store.refs(where=where)) if store.tip().version else 0


def pending_samples(settings: Settings) -> int:
    """Samples in the dataset that are in no window yet: an interrupted demo's."""
    from tide_platform.store.hidden_states import open_store

    ledger = Ledger(settings.ledger.url)
    try:
        last_row = ledger.scan(settings.deployment).last_row
    finally:
        ledger.close()
    store = open_store(settings)
    if not store.tip().version:
        return 0
    return sum(ref.row_id > last_row for ref in store.refs(where=f"tenant != '{REFERENCE_TENANT}'"))


def missing_reference(settings: Settings, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The reference prompts to send: an interrupted capture is continued, not begun again."""
    have = count_samples(settings, f"tenant = '{REFERENCE_TENANT}'")
    return list(prompts[have:])


def wait_landed(settings: Settings, tenant: str, wanted: int, show: Callable[[str], None]) -> None:
    """Wait until ``wanted`` samples of ``tenant`` are in the dataset. Raises :class:`NotLanded`."""
    deadline = time.monotonic() + LAND_TIMEOUT_S
    while (landed := count_samples(settings, f"tenant = '{tenant}'")) < wanted:
        if time.monotonic() > deadline:
            raise NotLanded(tenant, landed, wanted, LAND_TIMEOUT_S)
        show(f"waiting until the samples are in the dataset, {landed} of {wanted}")
        time.sleep(1.0)


def dropped_samples(client: SglangClient, settings: Settings) -> int:
    """Samples that were to be captured and were lost, in the server and in the spool."""
    dropped = dict(client.status()["capture"]["dropped"])
    lost = sum(dropped.values())
    status = settings.spool_folder / STATUS_FILE
    if status.is_file():
        lost += sum(json.loads(status.read_text())["dropped"].values())
    return lost
