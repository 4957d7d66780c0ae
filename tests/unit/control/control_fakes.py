"""A dataset in memory, as cutting sees it."""

from dataclasses import dataclass

from tide_platform.control.ledger import Ledger
from tide_platform.control.rollouts import Order
from tide_platform.control.states import WindowKey


@dataclass(frozen=True)
class Row:
    row_id: int
    tenant: str = "default"
    request_id: str = ""
    num_tokens: int = 10

    @property
    def sample_id(self) -> str:
        return f"s{self.row_id}"


def serve(ledger: Ledger, key: WindowKey, run_id: str, challenger: str = "new", previous: str = "old"):
    """A rollout of the window's challenger, all done."""
    order = Order(challenger, f"run {run_id}", "better", window=key.window, run_id=run_id)
    rollout = ledger.rollouts.begin(key.deployment, order, previous, ["http://server"])
    ledger.rollout_served(rollout, {})


class Data:
    """A growing dataset that counts reads."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.reads = 0

    def after(self, row_id: int) -> list[Row]:
        self.reads += 1
        return [row for row in self.rows if row.row_id > row_id]
