"""``summary.json``: what one demo measured. Field names are fixed; scripts read them."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Plain(Part):
    """The same server without speculation."""

    tokens_per_s: float


class Draft(Part):
    """A draft on the held_out prompts of the workload."""

    acceptance_length: float
    tokens_per_s: float
    draft: str  # digest


class Ratio(Part):
    """Adapted over static."""

    acceptance_length: float
    tokens_per_s: float


class General(Part):
    """Acceptance length on held_out general prompts; ``after`` is None where nothing was deployed."""

    before: float
    after: float | None


class Window(Part):
    samples: int
    tokens: int
    lance_version: int


class DagsterRun(Part):
    run_id: str | None
    launched_by: str | None  # name of the sensor, from the run's tags


class MlflowRun(Part):
    run_id: str | None
    model_version: str | None
    alias: str | None  # that points to this version now


class VerdictWords(Part):
    """What the gate said."""

    passed: bool
    champion: str
    challenger: str
    reasons: list[str]


class Summary(Part):
    """All measured in this run. ``adapted`` and ``ratio`` are None where the challenger was not deployed."""

    workload: str
    held_out_prompts: int
    k: int
    outcome: Literal["deployed", "rejected", "failed"]
    plain: Plain
    static: Draft
    adapted: Draft | None
    ratio: Ratio | None
    general: General
    window: Window
    dagster: DagsterRun
    mlflow: MlflowRun
    verdict: VerdictWords | None
    served_draft: str  # read back from the server at the end
    seconds: dict[str, float]  # by phase, and "total"
    samples_dropped: int

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        work = path.with_name(f".{path.name}.new")
        work.write_text(self.model_dump_json(indent=2) + "\n")
        work.replace(path)
