"""A dataset in memory, as cutting sees it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    row_id: int
    tenant: str = "default"
    request_id: str = ""
    num_tokens: int = 10

    @property
    def sample_id(self) -> str:
        return f"s{self.row_id}"


class Data:
    """A growing dataset that counts reads."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.reads = 0

    def after(self, row_id: int) -> list[Row]:
        self.reads += 1
        return [row for row in self.rows if row.row_id > row_id]
