"""The verdict: champion against challenger, paired, on the window and on the reference set (design 4.4)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tide_platform.config import TideError
from tide_platform.evaluation.sequence import Evidence
from tide_platform.evaluation.slices import Slice

SLACK_TOLD = 0.01  # nats: a reader is told when the target's probabilities are less well known than this


class NotJudgedYet(TideError):
    """A window without a verdict."""

    def __init__(self, window: str):
        super().__init__(
            f"window {window} has no verdict yet; run acceptance_report first (job adapt_draft does)"
        )
        self.window = window


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap interval at the gate's confidence."""

    point: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Measured:
    """Acceptance of one draft on one set of samples, by replay."""

    acceptance_length: float  # at the served k
    by_k: list[float]  # acceptance length at k = 1, 2, ...
    by_position: list[
        float
    ]  # acceptance rate of draft token 1, 2, ..., given that those before were accepted


@dataclass(frozen=True)
class Comparison:
    """Both drafts on one set. ``gain`` is challenger/champion acceptance length - 1."""

    requests: int
    champion: Measured
    challenger: Measured
    gain: Interval
    evidence: Evidence | None = None  # for verdicts that are looked at again
    slices: list[Slice] = field(default_factory=list)
    left_out: int = 0  # samples that hold not enough to be replayed under their verify rule
    slack: float = 0.0  # nats by which target probabilities are unknown (verify rule `rejection`)

    @property
    def ratio(self) -> float:
        """Challenger's acceptance length over the champion's."""
        return self.challenger.acceptance_length / self.champion.acceptance_length


@dataclass(frozen=True)
class Predicted:
    """Output tokens a second over the target alone at one batch size, by number of speculative steps: by the
    cost model, from the acceptance lengths on the window.
    """

    batch: int
    champion: dict[int, float]
    challenger: dict[int, float]

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Predicted":
        drafts = ({int(k): of for k, of in raw[draft].items()} for draft in ("champion", "challenger"))
        return cls(raw["batch"], *drafts)


@dataclass(frozen=True)
class Verdict:
    """What the gate said of a challenger against one named champion, with its evidence."""

    window: str
    champion: str  # digest of the draft that it was judged against
    challenger: str
    k: int  # speculative steps it was judged at
    confidence: float
    min_gain: float
    reference_floor: float
    passed: bool
    reasons: list[str] = field(default_factory=list)  # one a condition, whether met or not
    on_window: Comparison | None = None
    on_reference: Comparison | None = None
    earlier: int = 0  # verdicts on this challenger before this one
    predicted: list[Predicted] = field(default_factory=list)
    costs: str = ""  # where the prediction's coefficients are from, or why there are none

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Verdict":
        sets: dict[str, Any] = {name: _comparison(raw[name]) for name in ("on_window", "on_reference")}
        sets["predicted"] = [Predicted.from_json(each) for each in raw.get("predicted", [])]
        return cls(**(raw | sets))

    def metrics(self) -> dict[str, float]:
        """Flat figures for the registry; the champion's carry its name, so that runs can be compared."""
        figures: dict[str, float] = {}
        for name, compared in (("window", self.on_window), ("reference", self.on_reference)):
            if compared is None:
                continue
            figures[f"gain.{name}"] = compared.gain.point
            figures[f"gain_lower.{name}"] = compared.gain.lower
            figures[f"requests.{name}"] = compared.requests
            figures[f"champion.acceptance_length.{name}"] = compared.champion.acceptance_length
            if compared.evidence is not None:
                figures[f"gain_lower_any_time.{name}"] = compared.evidence.lower - 1
                figures[f"e_value.{name}"] = compared.evidence.e_value
            own = compared.challenger
            figures[f"acceptance_length.{name}"] = own.acceptance_length
            figures |= {f"acceptance_length.{name}.k{k}": value for k, value in enumerate(own.by_k, start=1)}
            figures |= {
                f"acceptance_rate.{name}.{i}": value for i, value in enumerate(own.by_position, start=1)
            }
        for each in self.predicted:
            for k, speed in each.challenger.items():
                figures[f"predicted_speed.batch{each.batch}.k{k}"] = speed
        return figures

    def markdown(self) -> str:
        """Tables of both drafts on both sets and by slice, what speed they predict, and the reasons."""
        lines = [
            f"**{'passed' if self.passed else 'rejected'}** at k = {self.k}",
            "",
            "| set | requests | champion | challenger | gain | interval |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, each in (("window", self.on_window), ("reference", self.on_reference)):
            if each is not None:
                lines.append(
                    f"| {name} | {each.requests} | {each.champion.acceptance_length:.3f} | "
                    f"{each.challenger.acceptance_length:.3f} | {each.gain.point:+.1%} | "
                    f"{each.gain.lower:+.1%} to {each.gain.upper:+.1%} |"
                )
        lines += ["", *(f"- {reason}" for reason in self.reasons)]
        return "\n".join(lines + _speed_table(self.predicted, self.costs) + _slice_table(self.on_window))

    @property
    def summary(self) -> str:
        """In words, in one line."""
        return ("passed: " if self.passed else "rejected: ") + "; ".join(self.reasons)


def decide(
    *,
    window: str,
    champion: str,
    challenger: str,
    k: int,
    on_window: Comparison,
    on_reference: Comparison,
    confidence: float,
    min_gain: float,
    reference_floor: float,
    earlier: int = 0,
    predicted: Sequence[Predicted] = (),
    costs: str = "",
) -> Verdict:
    """Pass iff the gain's lower bound on the window reaches ``min_gain`` and the reference ratio
    ``reference_floor``; where the challenger was judged before (``earlier`` verdicts), also the bound that
    holds for any number of looks: a bootstrap's holds for one.
    """
    gains, keeps = on_window.gain.lower >= min_gain, on_reference.ratio >= reference_floor
    holds = not earlier or (on_window.evidence is not None and on_window.evidence.lower - 1 >= min_gain)
    reasons = [
        f"gain on the window's {on_window.requests} requests {on_window.gain.point:+.1%}, lower bound "
        f"{on_window.gain.lower:+.1%} at {confidence:.0%} confidence "
        + (f"reaches {min_gain:+.1%}" if gains else f"is below {min_gain:+.1%}"),
        f"{on_reference.ratio:.3f} of the champion on {on_reference.requests} reference requests "
        + (f"keeps {reference_floor:.3f}" if keeps else f"is below {reference_floor:.3f}"),
        *_again(on_window, earlier, min_gain, holds),
        *_limits(on_window),
    ]
    return Verdict(
        window=window,
        champion=champion,
        challenger=challenger,
        k=k,
        confidence=confidence,
        min_gain=min_gain,
        reference_floor=reference_floor,
        passed=gains and keeps and holds,
        reasons=reasons,
        on_window=on_window,
        on_reference=on_reference,
        earlier=earlier,
        predicted=list(predicted),
        costs=costs,
    )


def _again(on_window: Comparison, earlier: int, min_gain: float, holds: bool) -> list[str]:
    """Of a challenger that was judged before."""
    if not earlier:
        return []
    found = on_window.evidence
    bound = (
        "no bound" if found is None else f"lower bound {found.lower - 1:+.1%} (e-value {found.e_value:.3g})"
    )
    word = "reaches" if holds else "is below"
    return [f"judged {earlier} times before: at any number of looks {bound} {word} {min_gain:+.1%}"]


def _limits(on_window: Comparison) -> list[str]:
    """What a reader must know of the replay."""
    told = []
    if on_window.left_out:
        told.append(f"{on_window.left_out} samples could not be replayed under their verify rule")
    if on_window.slack > SLACK_TOLD:
        told.append(f"the target's probabilities are known to {on_window.slack:.2g} nats (capture.teacher_k)")
    return told


def _speed_table(predicted: Sequence[Predicted], costs: str) -> list[str]:
    if not predicted:
        return ["", f"Predicted speed: {costs}"] if costs else []
    ks = [k for k in predicted[0].challenger if k]
    lines = [
        "",
        f"Predicted speed over the target alone, champion → challenger ({costs}):",
        "",
        "| batch | " + " | ".join(f"k = {k}" for k in ks) + " |",
        "| --- |" + " --- |" * len(ks),
    ]
    for each in predicted:
        pairs = (f"{each.champion[k]:.2f} → {each.challenger[k]:.2f}" for k in ks)
        lines.append(f"| {each.batch} | " + " | ".join(pairs) + " |")
    return lines


def _slice_table(compared: Comparison | None) -> list[str]:
    if compared is None or not compared.slices:
        return []
    lines = ["", "| slice | requests | champion | challenger | gain |", "| --- | --- | --- | --- | --- |"]
    return lines + [
        f"| {each.dimension} {each.value} | {each.requests} | {each.champion:.3f} | {each.challenger:.3f} | "
        f"{each.gain:+.1%} |"
        for each in compared.slices
    ]


def _comparison(raw: dict[str, Any] | None) -> Comparison | None:
    if raw is None:
        return None
    return Comparison(
        requests=raw["requests"],
        champion=Measured(**raw["champion"]),
        challenger=Measured(**raw["challenger"]),
        gain=Interval(**raw["gain"]),
        evidence=Evidence(**raw["evidence"]) if raw.get("evidence") else None,
        slices=[Slice(**each) for each in raw.get("slices", [])],
        left_out=raw.get("left_out", 0),
        slack=raw.get("slack", 0.0),
    )
