"""How many steps to speculate at which batch size, for SGLang to choose among, and what it gives live.

SGLang adapts k by itself (``--speculative-adaptive``, EAGLE and EAGLE3 with topk 1): a file names candidate
steps by batch size, 0 for none; within them it follows a moving average of the accepted drafts a round. It
knows nothing of what a step costs. So the costs go into the candidates and into the two thresholds
(``up_hysteresis``, ``down_hysteresis``) at which SGLang moves. Format and rules as SGLang 0.5.14 and 0.5.23
read them (``srt/speculative/adaptive_spec_params.py``):

- an entry holds from its batch size up to the next entry's, the first one below as well;
- at candidate c with average e it goes up when ``e > c - 0.5 + up``, and down to candidate p when
  ``e <= p - 0.5 + down`` (p = 0: ``0.5 + down``); from 0 it tries the next candidate every few rounds.

Pure: no torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tide_platform.evaluation.cost_model import BatchCosts, CostModel, best_k, speeds_of

# candidates are the fastest steps for a draft whose acceptance rates are so much lower, as known, and so much
# higher: what tenants and hours of one deployment differ by
SWING = 0.2
UP, DOWN = 0.0, -0.25  # SGLang's own
# what is left of the average at one k when SGLang may move again after another: its ema_alpha 0.2, every 5
# rounds. Without it SGLang goes back and forth: at more steps more drafts are accepted
_MEMORY = (1 - 0.2) ** 5
_ROOM = 0.02  # tokens between a threshold and what it must tell apart


@dataclass(frozen=True)
class Acceptance:
    """A draft's acceptance lengths at k = 1, 2, ..., and where they are from; empty where not known."""

    by_k: list[float]
    source: str


def candidates(costs: CostModel, by_k: Sequence[float]) -> dict[str, dict[str, Any]]:
    """SGLang's adaptive configuration: candidate steps and thresholds by batch size, up to the largest that
    was measured. ``by_k``: the champion's acceptance lengths at k = 1, 2, ...

    At the champion's acceptance SGLang settles on the fastest steps of the cost model. Where no batch size
    has a step that is worth taking, the smallest tries one: else a better draft would never be noticed.
    """
    found: dict[str, dict[str, Any]] = {}
    last: list[int] | None = None
    for batch in range(1, max(costs.by_batch) + 1):
        of_batch = costs.near(batch)
        steps = candidate_steps(of_batch, by_k)
        if steps != last:
            found[str(batch)] = _entry(steps, of_batch, by_k)
        last = steps
    if {step for entry in found.values() for step in entry["candidate_steps"]} == {0}:
        of_batch = costs.near(1)
        found["1"] = _entry([0, min(of_batch.verify)], of_batch, by_k)
    return found


def candidate_steps(costs: BatchCosts, by_k: Sequence[float]) -> list[int]:
    """Ascending. Of three steps that SGLang's thresholds cannot tell apart the highest is left out."""
    steps = sorted({best_k(speeds_of(scaled(by_k, f), costs)) for f in (1 - SWING, 1, 1 + SWING)})
    best = best_k(speeds_of(by_k, costs))
    ranges = _up_range(steps, best, by_k), _down_range(steps, best, by_k)
    apart = all(low + 2 * _ROOM < high for low, high in ranges)
    return steps if apart else [step for step in steps if step <= best]


def scaled(by_k: Sequence[float], factor: float) -> list[float]:
    """Acceptance lengths of a draft each of whose acceptance rates is ``factor`` times as high."""
    gained = np.diff([1.0, *by_k])  # by one more step: the product of the rates up to it
    longer = np.clip(gained * factor ** np.arange(1, len(gained) + 1), 0, 1)
    return (1 + longer.cumsum()).tolist()


def constant_rate(length: float, k: int, most: int) -> list[float]:
    """Acceptance lengths at k = 1 ... ``most`` of a draft with one acceptance rate at all positions, whose
    length at ``k`` is the given one: 1 + a + ... + a^k.
    """
    rates = np.linspace(0, 1, 10_001)
    at_k = sum(rates**i for i in range(k + 1))
    rate = float(rates[np.abs(at_k - length).argmin()])
    return np.cumsum([rate**i for i in range(most + 1)])[1:].tolist()


def _entry(steps: list[int], costs: BatchCosts, by_k: Sequence[float]) -> dict[str, Any]:
    """The thresholds stand where the fastest step and its neighbour are equally fast, as far as at the
    champion's acceptance SGLang then stays at the fastest and comes back to it from any other.
    """
    best = best_k(speeds_of(by_k, costs))
    below, above = (
        max((step for step in steps if step < best), default=None),
        min((step for step in steps if step > best), default=None),
    )
    up, down = UP, DOWN
    if above is not None and best:
        at = _break_even(best, above, 1 + SWING, costs, by_k)
        up = _accepted(at, best) - _rise(best)
        down = _accepted(at, above) - _drop(best)
    elif above is not None:  # as fast as no speculation: a round gives as many tokens as it costs steps
        down = costs.round(above) - 1 - _drop(0)
    if below:
        at = _break_even(best, below, 1 - SWING, costs, by_k)
        down = _accepted(at, best) - _drop(below)
        if above is None:
            up = _accepted(at, below) - _rise(below)
    elif below == 0:
        down = costs.round(best) - 1 - _drop(0)
    return {
        "candidate_steps": steps,
        "up_hysteresis": _within(up, *_up_range(steps, best, by_k)),
        "down_hysteresis": _within(down, *_down_range(steps, best, by_k)),
    }


def _break_even(best: int, other: int, until: float, costs: BatchCosts, by_k: Sequence[float]) -> list[float]:
    """Acceptance lengths at the first factor, from 1 to ``until``, at which ``other`` is as fast."""
    for factor in np.linspace(1, until, 101):
        lengths = scaled(by_k, float(factor))
        speeds = speeds_of(lengths, costs)
        if speeds[other] >= speeds[best]:
            return lengths
    return scaled(by_k, until)


def _accepted(by_k: Sequence[float], k: int) -> float:
    return by_k[k - 1] - 1 if k else 0.0


def _rise(step: int) -> float:
    """Accepted drafts above which SGLang goes up from ``step``, without hysteresis."""
    return step - 0.5


def _drop(to: int) -> float:
    """Accepted drafts at which SGLang goes down to ``to``."""
    return to - 0.5 if to else 0.5


def _up_range(steps: list[int], best: int, by_k: Sequence[float]) -> tuple[float, float]:
    """Values of ``up_hysteresis`` with which it rises to ``best`` from below, and stays there, even when it
    was above just now.
    """
    lows, highs = [-np.inf], [np.inf]
    for step, next_up in pairwise(steps):
        if step and step < best:
            highs.append(_accepted(by_k, step) - _rise(step))
        elif step:
            lows.append(_after(step, next_up, by_k) - _rise(step))
    return max(lows), min(highs)


def _down_range(steps: list[int], best: int, by_k: Sequence[float]) -> tuple[float, float]:
    """Values of ``down_hysteresis`` with which it falls to ``best`` from above, and stays there, even when it
    was below just now.
    """
    lows, highs = [-np.inf], [np.inf]
    for to, step in pairwise(steps):
        if step > best:
            lows.append(_accepted(by_k, step) - _drop(to))
        else:
            highs.append(_after(step, to, by_k) - _drop(to))
    return max(lows), min(highs)


def _after(step: int, other: int, by_k: Sequence[float]) -> float:
    """SGLang's average at ``step`` when it may move again, coming from ``other``."""
    return (1 - _MEMORY) * _accepted(by_k, step) + _MEMORY * _accepted(by_k, other)


def _within(value: float, low: float, high: float) -> float:
    return round(float(min(max(value, low + _ROOM), high - _ROOM)), 4)


class Decoded(Protocol):
    """Finished requests of one batch size (:class:`tide_platform.control.history.Block` is one)."""

    @property
    def batch(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def decode_s(self) -> float: ...
    @property
    def decoded(self) -> int: ...


@dataclass(frozen=True)
class Speedup:
    """Live speed over the target alone at one batch size."""

    value: float  # plain_ms / token_ms
    requests: int  # that it rests on
    token_ms: float  # live, a token behind a request's first
    plain_ms: float  # a step of the target alone, by the cost model


def measured(cost_model: CostModel, blocks: Iterable[Decoded]) -> dict[int, Speedup]:
    """By batch size of the blocks (up to 1, 2, 4, ... requests at a time), where the cost model covers it:
    the time of a plain step there over the mean time a live token took.

    The live time holds what a request waits for others' prompts; the plain step does not: where prompts are
    long the value is too low, never too high by that.
    """
    sums: dict[int, np.ndarray] = {}
    for block in blocks:
        counted = sums.setdefault(block.batch, np.zeros(3))
        counted += (block.requests, block.decode_s, block.decoded)
    found = {}
    for batch, (requests, decode_s, decoded) in sorted(sums.items()):
        if not decoded or not decode_s or not cost_model.covers(batch):
            continue
        token_ms, plain_ms = float(decode_s * 1000 / decoded), cost_model.near(batch).step_ms
        found[batch] = Speedup(plain_ms / token_ms, int(requests), token_ms, plain_ms)
    return found


@dataclass(frozen=True)
class Alarm:
    """What changed. ``values``: batch size (as text) -> speed-up, to be kept for the next look."""

    slower: list[int] = field(default_factory=list)  # speculation has become slower than none
    recovered: list[int] = field(default_factory=list)
    values: dict[str, float] = field(default_factory=dict)


def alarm(
    before: Mapping[str, float], now: Mapping[int, Speedup], min_requests: int, hysteresis: float
) -> Alarm:
    """Which batch sizes fell under 1, and which of those are at ``1 + hysteresis`` again.

    ``before``: the ``values`` of the last look; a batch size is in alarm where its value is under 1. Figures
    of fewer than ``min_requests`` requests change nothing, and one between the two bounds ends no alarm: the
    value before it is kept.
    """
    values, slower, recovered = dict(before), [], []
    for batch, speedup in sorted(now.items()):
        if speedup.requests < min_requests:
            continue
        alarmed = before.get(str(batch), 1.0) < 1
        if alarmed and 1 <= speedup.value < 1 + hysteresis:
            continue
        values[str(batch)] = speedup.value
        if alarmed != (speedup.value < 1):
            (recovered if alarmed else slower).append(batch)
    return Alarm(slower, recovered, values)
