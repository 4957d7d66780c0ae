"""Cutting a growing dataset into windows, and dividing a window's samples. Pure: no Lance, no Dagster."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from tide_platform.capture.split import REFERENCE_TENANT, VALIDATION, point
from tide_platform.config import TideError
from tide_platform.control.records import Cut, Scan
from tide_platform.control.states import WindowKey

REFERENCE_JUDGE_SHARE = 0.25  # of the reference set: for judging only, never replayed in training
MIN_SAMPLES = 2  # of a window: one to train on, one to judge by
MAX_CUTS = 8  # windows a tick: a tick stays short however much landed while the daemon was down


class Ref(Protocol):
    """What cutting and splitting read of a sample (``store.SampleRef`` has it)."""

    @property
    def row_id(self) -> int: ...
    @property
    def sample_id(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def captured_at(self) -> float: ...


R = TypeVar("R", bound=Ref)


class DatasetReplaced(TideError):
    """The dataset is older than what the ledger has read of it."""

    def __init__(self, deployment: str, version: int, known: int):
        super().__init__(
            f"{deployment}: the dataset is at version {version}, the ledger has read {known}; "
            "it was replaced by another: move the ledger (ledger.url) away with the old one, or put that back"
        )
        self.deployment, self.version, self.known = deployment, version, known


class NoReference(TideError):
    """Nothing to judge forgetting by."""

    def __init__(self, deployment: str, found: int):
        super().__init__(
            f"{deployment}: {found} reference samples in the dataset, at least 2 are needed; send "
            f"general prompts with `tide traffic general --tenant {REFERENCE_TENANT}`"
        )
        self.deployment, self.found = deployment, found


@dataclass(frozen=True)
class Fall:
    """Of live acceptance. ``at``: Unix time, seconds; ``samples``: as many captured since are a window."""

    text: str
    at: float
    samples: int


@dataclass(frozen=True)
class Rule:
    """When samples become a window: as soon as one of these is reached. ``fall``: one that no window was cut
    for yet.
    """

    samples: int
    tokens: int | None = None
    fall: Fall | None = None

    def may_be_met(self, pending: int, new: int) -> bool:
        """Whether ``new`` samples that nothing is known of can complete a window that ``pending`` ones did
        not.
        """
        if pending + new >= self.samples:
            return True
        if self.fall is not None and new > 0 and pending + new >= self.fall.samples:
            return True
        return self.tokens is not None and new > 0 and pending + new >= MIN_SAMPLES

    def met(self, samples: int, tokens: int, since_fall: int = 0) -> dict[str, Any] | None:
        """What is stored with the window: the rule that cut it, and what all of them saw. ``since_fall``: of
        the samples, those that were captured since the fall.
        """
        if samples >= self.samples:
            by = "samples"
        elif self.tokens is not None and tokens >= self.tokens and samples >= MIN_SAMPLES:
            by = "tokens"
        elif self.fall is not None and since_fall >= self.fall.samples:
            by = "drift"
        else:
            return None
        seen: dict[str, Any] = {"samples": samples, "tokens": tokens}
        asked: dict[str, Any] = {"min_samples": self.samples, "min_tokens": self.tokens}
        if self.fall is not None:
            seen |= {"drift": self.fall.text, "samples_since_drift": since_fall}
            asked |= {"drift_samples": self.fall.samples}
        return {"by": by, **seen, **asked}


def cut(
    deployment: str,
    scan: Scan,
    version: int,
    rows: int,
    read_after: Callable[[int], Sequence[Ref]],
    rule: Rule,
) -> tuple[Scan, list[Cut]]:
    """The windows that are complete by ``rule`` at (``version``, ``rows``), and the new scan.

    ``read_after(row_id)`` reads the metadata of all rows behind a row id; it is called at most once, and not
    at all while fewer rows landed than a window needs. Raises :class:`DatasetReplaced`.
    """
    if version < scan.version:
        raise DatasetReplaced(deployment, version, scan.version)
    grown = rows - scan.rows
    if grown >= 0 and not rule.may_be_met(scan.pending, grown):
        return scan, []
    new = sorted(read_after(scan.last_row), key=lambda ref: ref.row_id)
    samples = [ref for ref in new if ref.tenant != REFERENCE_TENANT]
    cuts, last_row = [], scan.last_row
    first = tokens = since_fall = 0
    for end, ref in enumerate(samples, start=1):
        tokens += ref.num_tokens
        since_fall += rule.fall is not None and ref.captured_at >= rule.fall.at
        if (why := rule.met(end - first, tokens, since_fall)) is not None:
            cuts.append(Cut(last_row, ref.row_id, version, end - first, tokens, why))
            last_row, first, tokens, since_fall = ref.row_id, end, 0, 0
            rule = replace(rule, fall=None)  # it has its window
            if len(cuts) == MAX_CUTS:
                break
    pending = len(samples) - sum(each.samples for each in cuts)
    if len(cuts) == MAX_CUTS:  # the rest was not looked at: to the next tick it has just landed
        return Scan(version, rows - pending, last_row, 0), cuts
    if not pending and new:
        last_row = max(last_row, new[-1].row_id)  # reference rows alone: no need to read them again
    return Scan(version, rows, last_row, pending), cuts


def retired(deployment: str, partitions: Sequence[str], opened: Set[WindowKey], keep: int) -> list[str]:
    """Of the deployment's ``partitions``, those that are not among its newest ``keep`` and not ``opened``."""
    own = sorted(key for text in partitions if (key := WindowKey.parse(text)).deployment == deployment)
    return [str(key) for key in own[: max(0, len(own) - keep)] if key not in opened]


@dataclass(frozen=True)
class Division:
    """Sample ids of one training run, each list in the dataset's order."""

    train: list[str]
    validation: list[str]
    reference_train: list[str]  # the trainer draws from it as many as it replays
    reference_judge: list[str]


def divide(
    deployment: str, samples: Sequence[Ref], reference: Sequence[Ref], validation_share: float
) -> Division:
    """Divide a window's samples and the reference set.

    By hash of the request: stretches of one request never stand on both sides, and the same request is on the
    same side in every window. Raises :class:`NoReference`.
    """
    validation, train = halve(samples, validation_share, VALIDATION)
    judge, replay = halve(reference, REFERENCE_JUDGE_SHARE, REFERENCE_TENANT)
    if not judge or not replay:
        raise NoReference(deployment, len(reference))
    return Division(*([ref.sample_id for ref in part] for part in (train, validation, replay, judge)))


def halve(refs: Sequence[R], share: float, salt: str) -> tuple[list[R], list[R]]:
    """(about ``share`` of the refs, the others) by hash of the request id.

    Of two requests or more, each side gets at least one: the lowest hash and the highest.
    """
    points = {ref.request_id: point(ref.request_id, salt) for ref in refs}
    if len(points) < 2:
        return [], list(refs)
    ranked = sorted(points, key=lambda request: (points[request], request))
    inside = {request for request in ranked if points[request] < share}
    inside = (inside | {ranked[0]}) - {ranked[-1]}
    return [ref for ref in refs if ref.request_id in inside], [
        ref for ref in refs if ref.request_id not in inside
    ]
