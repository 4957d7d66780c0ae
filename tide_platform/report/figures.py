"""Every figure of the report. Field names are fixed: `tide report --json` prints them, and scripts read them.

Times are Unix times in seconds. Where a figure is not known it is ``None`` and the page says so.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from tide_platform.evaluation.slices import Slice


@dataclass(frozen=True)
class Cell:
    """Finished live requests that share what is not ``None`` here, added up.

    ``batch``: requests at a time, the upper end of its band (1, 2, 4, 8, ...). ``tokens_per_s``: about what a
    server gives at that band, ``batch * 1000 / mean_token_ms``.
    """

    began_at: float
    ended_at: float
    draft: str | None
    batch: int | None
    tenant: str | None
    requests: int
    aborted: int
    tokens: int
    rounds: int
    accepted: int
    acceptance_length: float | None
    mean_token_ms: float | None
    token_ms_p50: float | None
    token_ms_p99: float | None
    tokens_per_s: float | None

    @property
    def at(self) -> float:
        """The middle of its stretch of time."""
        return (self.began_at + self.ended_at) / 2


@dataclass(frozen=True)
class Served:
    """The draft that is served. ``by``: who asked for it; None where no deployment is known and it is only
    what the newest live requests were served by.
    """

    digest: str
    since: float | None
    by: str | None
    reason: str | None
    window: str | None
    at_promotion: float | None  # acceptance length, watched on the canary, else of its verdict


@dataclass(frozen=True)
class Mark:
    """Something that happened to what is served."""

    at: float
    what: str  # deployed | promoted | rolled back | undone
    digest: str  # the draft that it is about; of `rolled back` the one that was taken back
    serves: str  # the draft that is served behind it
    window: str | None
    actor: str | None
    reason: str


@dataclass(frozen=True)
class WindowRow:
    window: str
    state: str
    samples: int
    tokens: int
    attempt: int
    challenger: str | None
    reason: str | None
    created_at: float
    updated_at: float


@dataclass(frozen=True)
class VerdictFigures:
    """The newest verdict. ``by_position``: acceptance rate of draft token 1, 2, ... by draft."""

    window: str
    at: float
    champion: str
    challenger: str
    passed: bool
    k: int
    reasons: list[str]
    requests: int
    acceptance_length: dict[str, float]  # champion, challenger
    by_position: dict[str, list[float]]
    slices: list[Slice]


@dataclass(frozen=True)
class HeldRow:
    """A freeze, or a draft's bar."""

    digest: str | None
    actor: str
    reason: str
    at: float


@dataclass(frozen=True)
class AuditRow:
    at: float
    actor: str
    action: str
    window: str | None
    digest: str | None
    reason: str


@dataclass(frozen=True)
class Baseline:
    """What a token takes with the first draft at one batch band, over all of its requests."""

    batch: int
    requests: int
    tokens: int  # behind each request's first
    token_ms: float


@dataclass(frozen=True)
class Stretch:
    """Tokens of a later draft in one stretch of time at one band that the first draft has served as well.
    Seconds are of a server: seconds of the requests over ``batch``.
    """

    began_at: float
    ended_at: float
    draft: str
    batch: int
    tokens: int
    taken_s: float
    would_s: float  # by the first draft

    @property
    def saved_s(self) -> float:
        return self.would_s - self.taken_s


@dataclass(frozen=True)
class Saved:
    """What later drafts saved against the first. ``share``: of the time that the first would have taken; None
    where nothing is claimed, and ``words`` say why.
    """

    first: str | None
    words: str
    baselines: list[Baseline] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    tokens: int = 0  # by later drafts, timed
    compared: int = 0  # of these, at a band that the first draft has served
    missing: list[int] = field(default_factory=list)  # bands that it has not
    taken_hours: float = 0.0
    would_hours: float = 0.0
    saved_hours: float = 0.0
    share: float | None = None


@dataclass(frozen=True)
class PredictedRow:
    """Output tokens a second over those of the target alone, by the cost model and live acceptance."""

    batch: int
    draft: str
    k: int
    acceptance_length: float
    speed: float


@dataclass(frozen=True)
class Report:
    """All of it."""

    deployment: str
    made_at: float
    since: float
    served: Served | None
    live: Cell | None  # everything; None where no live request is known
    missed: int  # requests that servers forgot before they were asked
    mixed: int  # requests that straddled a reload: in sums, of no draft
    bin_s: float  # of `acceptance`, `speed`, `volume`
    acceptance: list[Cell]  # by time and draft
    speed: list[Cell]  # by time and batch
    volume: list[Cell]  # by time
    by_concurrency: list[Cell]  # by batch and draft
    steps: dict[int, int]  # decode steps by the number of requests in them
    by_tenant: list[Cell]  # by tenant and draft
    marks: list[Mark]
    verdict: VerdictFigures | None
    windows: dict[str, int]  # by state
    last_windows: list[WindowRow]
    frozen: HeldRow | None
    bars: list[HeldRow]
    audit: list[AuditRow]
    saved: Saved
    predicted: list[PredictedRow]
    costs: str  # where the prediction's coefficients are from, or why there are none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
