"""The verdict: champion against challenger, paired, on the window and on the reference set (design 4.4)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tide_platform.config import TideError
from tide_platform.evaluation.sequence import Evidence
from tide_platform.evaluation.slices import Slice, under_floor
from tide_platform.evaluation.throughput import Throughput
from tide_platform.registry.names import CHAMPION_PREFIX, MOST_VALUES, SLICED, value_part

SLACK_TOLD = 0.01  # nats: a reader is told when the target's probabilities are less well known than this
OUTSIDE_TOLD = 0.05  # of the time at batch sizes without costs of their own


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
    throughput: Throughput | None = None  # what was decided on; None: the gain in acceptance length
    slice_floor: float | None = None  # None in verdicts from before there was one
    below_floor: list[Slice] = field(default_factory=list)  # slices that the challenger loses

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Verdict":
        sets: dict[str, Any] = {name: _comparison(raw[name]) for name in ("on_window", "on_reference")}
        sets["predicted"] = [Predicted.from_json(each) for each in raw.get("predicted", [])]
        sets["throughput"] = Throughput.from_json(raw["throughput"]) if raw.get("throughput") else None
        sets["below_floor"] = [Slice(**each) for each in raw.get("below_floor", [])]
        return cls(**(raw | sets))

    def metrics(self, slices: bool = True) -> dict[str, float]:
        """Flat figures under the names of :mod:`tide_platform.registry.names`; the champion's stand beside
        the challenger's.
        """
        figures: dict[str, float] = {}
        for name, compared in (("window", self.on_window), ("reference", self.on_reference)):
            if compared is None:
                continue
            figures[f"gain.{name}"] = compared.gain.point
            figures[f"gain_lower.{name}"] = compared.gain.lower
            figures[f"gain_upper.{name}"] = compared.gain.upper
            figures[f"requests.{name}"] = compared.requests
            if compared.evidence is not None:
                figures[f"gain_lower_any_time.{name}"] = compared.evidence.lower - 1
                figures[f"e_value.{name}"] = compared.evidence.e_value
            for prefix, of in (("", compared.challenger), (CHAMPION_PREFIX, compared.champion)):
                length = f"{prefix}acceptance_length.{name}"
                figures[length] = of.acceptance_length
                figures |= {f"{length}.k{k}": value for k, value in enumerate(of.by_k, start=1)}
                rates = enumerate(of.by_position, start=1)
                figures |= {f"{prefix}acceptance_rate.{name}.{i}": value for i, value in rates}
            if slices:
                figures |= _slice_metrics(name, compared.slices)
        for each in self.predicted:
            for prefix, speeds in (("", each.challenger), (CHAMPION_PREFIX, each.champion)):
                batch = f"{prefix}predicted_speed.batch{each.batch}"
                figures |= {f"{batch}.k{k}": speed for k, speed in speeds.items()}
        if self.throughput is not None:
            figures["predicted_gain"] = self.throughput.ratio - 1
            figures["predicted_gain_lower"] = self.throughput.lower - 1
            figures["predicted_speed"] = self.throughput.challenger
        return figures

    def markdown(self) -> str:
        """Tables of both drafts on both sets and by slice, what speed they predict, and the reasons."""
        from tide_platform.control.verdict_page import page

        return page(self)

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
    slice_floor: float,
    slice_requests: int,
    earlier: int = 0,
    predicted: Sequence[Predicted] = (),
    costs: str = "",
    throughput: Throughput | None = None,
    no_throughput: str = "",
) -> Verdict:
    """Pass iff

    - the lower bound of the gain on the window reaches ``min_gain``: of predicted ``throughput``, or where
      there is none (``no_throughput`` says why), of the acceptance length at ``k``;
    - where the challenger was judged before (``earlier`` verdicts), also the bound on acceptance that holds
      for any number of looks: a bootstrap's holds for one;
    - the reference ratio reaches ``reference_floor``;
    - no slice of ``slice_requests`` requests or more is below ``slice_floor``
      (:func:`~tide_platform.evaluation.slices.under_floor`).
    """
    gain = on_window.gain
    if throughput is not None:
        gain = Interval(throughput.ratio - 1, throughput.lower - 1, throughput.upper - 1)
    gains, keeps = gain.lower >= min_gain, on_reference.ratio >= reference_floor
    holds = not earlier or (on_window.evidence is not None and on_window.evidence.lower - 1 >= min_gain)
    lost = under_floor(on_window.slices, slice_floor, slice_requests)
    what = "gain" if throughput is None else "predicted gain in tokens a second"
    reasons = [
        f"{what} on the window's {on_window.requests} requests {gain.point:+.1%}, lower bound "
        f"{gain.lower:+.1%} at {confidence:.0%} confidence "
        + (f"reaches {min_gain:+.1%}" if gains else f"is below {min_gain:+.1%}"),
        *_how(throughput, no_throughput, k),
        f"{on_reference.ratio:.3f} of the champion on {on_reference.requests} reference requests "
        + (f"keeps {reference_floor:.3f}" if keeps else f"is below {reference_floor:.3f}"),
        *_again(on_window, earlier, min_gain, holds),
        *_lost(lost, slice_floor),
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
        passed=gains and keeps and holds and not lost,
        reasons=reasons,
        on_window=on_window,
        on_reference=on_reference,
        earlier=earlier,
        predicted=list(predicted),
        costs=costs,
        throughput=throughput,
        slice_floor=slice_floor,
        below_floor=lost,
    )


def _how(throughput: Throughput | None, no_throughput: str, k: int) -> list[str]:
    """What the gain is one of, and what a reader must know of the prediction."""
    if throughput is None:
        return (
            [f"judged by acceptance at k = {k}: tokens a second are {no_throughput}"] if no_throughput else []
        )
    told = []
    if throughput.challenger < 1:
        told.append(
            f"even the challenger is predicted to be slower than no speculation: {throughput.challenger:.2f} "
            "times as fast at these batch sizes; see `tide speculation`"
        )
    if throughput.outside > OUTSIDE_TOLD:
        told.append(
            f"{throughput.outside:.0%} of the time at batch sizes outside of the measured ones, predicted at "
            "the costs of the nearest; `tide bench cost-model` measures more"
        )
    return told


def _lost(lost: Sequence[Slice], floor: float) -> list[str]:
    return [
        f"{1 + each.gain:.3f} of the champion on the {each.requests} requests of {each.name} is below "
        f"{floor:.3f}"
        for each in lost
    ]


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


def _slice_metrics(name: str, slices: Sequence[Slice]) -> dict[str, float]:
    """Of the slices with most requests, of each dimension whose values mean the same in every window."""
    figures: dict[str, float] = {}
    for dimension in SLICED:
        of = sorted((each for each in slices if each.dimension == dimension), key=lambda one: -one.requests)
        for each in of[:MOST_VALUES]:
            at = f"{name}.{dimension}.{value_part(each.value)}"
            figures[f"acceptance_length.{at}"] = each.challenger
            figures[f"{CHAMPION_PREFIX}acceptance_length.{at}"] = each.champion
            figures[f"gain.{at}"] = each.gain
    return figures


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
