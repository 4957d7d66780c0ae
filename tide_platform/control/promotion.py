"""The verdict: champion against challenger, paired, on the window and on the reference set (design 4.4)."""

from dataclasses import asdict, dataclass, field
from typing import Any

from tide_platform.config import TideError


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

    @property
    def ratio(self) -> float:
        """Challenger's acceptance length over the champion's."""
        return self.challenger.acceptance_length / self.champion.acceptance_length


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Verdict":
        sets: dict[str, Any] = {name: _comparison(raw[name]) for name in ("on_window", "on_reference")}
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
            own = compared.challenger
            figures[f"acceptance_length.{name}"] = own.acceptance_length
            figures |= {f"acceptance_length.{name}.k{k}": value for k, value in enumerate(own.by_k, start=1)}
            figures |= {
                f"acceptance_rate.{name}.{i}": value for i, value in enumerate(own.by_position, start=1)
            }
        return figures

    def markdown(self) -> str:
        """A table of both drafts on both sets, and the reasons."""
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
        return "\n".join([*lines, "", *(f"- {reason}" for reason in self.reasons)])

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
) -> Verdict:
    """Pass iff the gain's lower bound on the window reaches ``min_gain`` and the reference ratio
    ``reference_floor``.
    """
    gains, keeps = on_window.gain.lower >= min_gain, on_reference.ratio >= reference_floor
    reasons = [
        f"gain on the window's {on_window.requests} requests {on_window.gain.point:+.1%}, lower bound "
        f"{on_window.gain.lower:+.1%} at {confidence:.0%} confidence "
        + (f"reaches {min_gain:+.1%}" if gains else f"is below {min_gain:+.1%}"),
        f"{on_reference.ratio:.3f} of the champion on {on_reference.requests} reference requests "
        + (f"keeps {reference_floor:.3f}" if keeps else f"is below {reference_floor:.3f}"),
    ]
    return Verdict(
        window=window,
        champion=champion,
        challenger=challenger,
        k=k,
        confidence=confidence,
        min_gain=min_gain,
        reference_floor=reference_floor,
        passed=gains and keeps,
        reasons=reasons,
        on_window=on_window,
        on_reference=on_reference,
    )


def _comparison(raw: dict[str, Any] | None) -> Comparison | None:
    if raw is None:
        return None
    return Comparison(
        requests=raw["requests"],
        champion=Measured(**raw["champion"]),
        challenger=Measured(**raw["challenger"]),
        gain=Interval(**raw["gain"]),
    )
