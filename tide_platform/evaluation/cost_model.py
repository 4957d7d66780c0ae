"""What acceptance is worth in tokens a second (TIDE, arXiv 2602.05145, equations 2 to 5).

At batch size b a plain decoding step costs T(b) and gives each request a token. A round of k speculative
steps costs ``(c k + beta(k)) T(b)``: k draft steps of c(b) plain steps each, and a verify pass of
beta(b, k) = (verify pass) / T(b). It gives ``E[l](k) = 1 + sum over i <= k of prod over j <= i of a_j``
tokens, a_j being the acceptance rate at position j. So speculation is ``S(k) = E[l](k) / (c k + beta(k))``
times as fast as the target alone; 1 at k = 0.

The coefficients belong to a machine, a target and a batch size; `tide bench cost-model` measures them and
keeps them in ``STATE/cost_model.json``. Pure: no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from tide_platform.config import Settings, TideError
from tide_platform.config.files import write_json

FILE = "cost_model.json"


class NoCostModel(TideError):
    """The file is there, and is none."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}; measure again with `tide bench cost-model`")
        self.path, self.reason = path, reason


class NotMeasured(TideError):
    """A batch size or number of steps without coefficients."""

    def __init__(self, what: str, known: Sequence[int]):
        super().__init__(f"the cost model has no {what}, only {', '.join(map(str, known))}")
        self.what, self.known = what, known


@dataclass(frozen=True)
class BatchCosts:
    """At one batch size; costs are in plain decoding steps of that batch."""

    step_ms: float  # of a plain decoding step
    draft: float  # c: one draft step
    verify: dict[int, float]  # k -> beta(k), the verify pass of k + 1 tokens a request

    def round(self, k: int) -> float:
        """Cost of a round of ``k`` steps; without speculation, of a step. Raises :class:`NotMeasured`."""
        if k == 0:
            return 1.0
        if k not in self.verify:
            raise NotMeasured(f"k = {k}", sorted(self.verify))
        return self.draft * k + self.verify[k]


@dataclass(frozen=True)
class CostModel:
    """Coefficients by batch size, and where they were measured."""

    by_batch: dict[int, BatchCosts]
    target_digest: str
    conditions: dict[str, Any] = field(default_factory=dict)

    def at(self, batch: int) -> BatchCosts:
        """Raises :class:`NotMeasured`."""
        if batch not in self.by_batch:
            raise NotMeasured(f"batch size {batch}", sorted(self.by_batch))
        return self.by_batch[batch]

    def near(self, batch: float) -> BatchCosts:
        """At any batch size. Between two that were measured, the *times* of a plain step, a draft step and a
        verify pass are each a straight line: a pass takes a time that it takes anyway (weights are read) and
        a share for each request. Steps k are those that both have. Outside, the nearest batch size's.
        """
        known = sorted(self.by_batch)
        inside = min(max(batch, known[0]), known[-1])
        low = max(size for size in known if size <= inside)
        high = min(size for size in known if size >= inside)
        a, b = self.by_batch[low], self.by_batch[high]
        share = (inside - low) / (high - low) if high > low else 0.0

        def between(x: float, y: float) -> float:
            return (1 - share) * x * a.step_ms + share * y * b.step_ms

        step_ms = between(1, 1)
        verify = {
            k: between(a.verify[k], b.verify[k]) / step_ms for k in sorted(a.verify.keys() & b.verify.keys())
        }
        return BatchCosts(step_ms, between(a.draft, b.draft) / step_ms, verify)

    def covers(self, batch: float) -> bool:
        """Whether it lies between batch sizes that were measured."""
        return min(self.by_batch) <= batch <= max(self.by_batch)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> "CostModel | None":
        """``None`` where there is no file. Raises :class:`NoCostModel`."""
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_text())
            by_batch = {int(batch): _costs(of) for batch, of in raw["by_batch"].items()}
            return cls(by_batch, raw["target_digest"], raw["conditions"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoCostModel(path, f"not a cost model ({type(error).__name__}: {error})") from error


def of_deployment(settings: Settings, target_digest: str) -> tuple[CostModel | None, str]:
    """The model that holds for what is served, and where it is from; else None, and why there is none.

    Raises :class:`NoCostModel`.
    """
    path = settings.state / FILE
    model = CostModel.read(path)
    if model is None:
        return None, "not known: no cost model was measured; `tide bench cost-model` does"
    of = model.conditions
    if model.target_digest != target_digest:
        return (
            None,
            f"not known: {path} was measured with another target; `tide bench cost-model` measures again",
        )
    if of.get("dtype") != settings.serving.dtype or of.get("device") != settings.serving.device:
        return None, (
            f"not known: {path} was measured on {of.get('device')} in {of.get('dtype')}, served is "
            f"{settings.serving.device} in {settings.serving.dtype}; `tide bench cost-model` measures again"
        )
    return model, f"costs measured {of.get('date')} on {of.get('cores')} cores, {of.get('dtype')}"


def expected_tokens(by_position: Sequence[float], k: int) -> float:
    """Tokens a round at ``k`` speculative steps, the bonus token included: E[l]. Raises ``ValueError`` where
    there are fewer acceptance rates.
    """
    if k > len(by_position):
        raise ValueError(f"{len(by_position)} acceptance rates, {k} needed")
    return 1.0 + sum(accumulate(by_position[:k], mul))


def speed(by_position: Sequence[float], k: int, costs: BatchCosts) -> float:
    """Output tokens a second over those of the target alone."""
    return expected_tokens(by_position, k) / costs.round(k)


def speeds(by_position: Sequence[float], costs: BatchCosts) -> dict[int, float]:
    """By k, 0 included, for every k that has both a rate and a cost."""
    ks = [0, *(k for k in sorted(costs.verify) if k <= len(by_position))]
    return {k: speed(by_position, k, costs) for k in ks}


def speeds_of(lengths: Sequence[float], costs: BatchCosts) -> dict[int, float]:
    """The same from acceptance lengths at k = 1, 2, ..., as replay gives them for each k."""
    found = {k: tokens / costs.round(k) for k, tokens in enumerate(lengths, start=1) if k in costs.verify}
    return {0: 1.0} | found


def best_k(by_speed: Mapping[int, float]) -> int:
    """The fastest k; the smallest of those that are equally fast."""
    return min(by_speed, key=lambda k: (-by_speed[k], k))


def best_k_by_margin(by_position: Sequence[float], costs: BatchCosts) -> int:
    """The k at which one more step first costs more than it brings: step k + 1 is worth taking iff

    ``prod(a_1 .. a_k+1) / E[l](k)  >  (cost(k + 1) - cost(k)) / cost(k)``.

    The fastest k wherever the marginal cost of a step does not fall, since what it brings never rises (with k
    = 0 aside, whose first step pays for the verify pass). Goes by k = 1, 2, ... as far as both are known.
    """
    k = 1
    while k + 1 in costs.verify and k + 1 <= len(by_position):
        brings = expected_tokens(by_position, k + 1) / expected_tokens(by_position, k) - 1
        if brings <= costs.round(k + 1) / costs.round(k) - 1:
            break
        k += 1
    return k if speed(by_position, k, costs) > 1 else 0


def _costs(raw: dict[str, Any]) -> BatchCosts:
    return BatchCosts(raw["step_ms"], raw["draft"], {int(k): beta for k, beta in raw["verify"].items()})
