"""The plan of a run: which samples each optimizer step takes, known before any tensor is read.

Of a stored sample the plan needs its lengths alone, which are plain columns.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tide_platform.capture.record import SampleMeta
from tide_platform.training.data import plan_epoch


class Sized(Protocol):
    """What a plan knows of a sample (:class:`~tide_platform.training.data.Example` has it)."""

    @property
    def sample_id(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def roots(self) -> int: ...


@dataclass(frozen=True)
class Expected:
    """The lengths of an example, as its metadata promise them; positions as in ``training.data``."""

    sample_id: str
    context: int
    roots: int


@dataclass(frozen=True)
class PlannedStep:
    """Of one optimizer step."""

    epoch: int  # from 0
    last_of_epoch: bool
    samples: tuple[int, ...]  # indices into the pool


@dataclass(frozen=True)
class Plan:
    """All optimizer steps of a run, in order."""

    steps: list[PlannedStep]
    digest: str  # of the order of all sample ids, step by step


def expected(meta: SampleMeta, steps: int, max_length: int) -> Expected | str:
    """What the sample's metadata promise for an unroll of ``steps``, or why it cannot teach anything.

    A draft learns from predictions of response tokens behind response tokens (design 4.3), so it takes two
    of them among the first ``max_length``.
    """
    prompt = max(0, meta.prompt_tokens - meta.start_pos)
    length = min(meta.num_tokens, max_length)
    if length < 3 or length - prompt < 2:
        cut = meta.num_tokens >= 3 and meta.num_tokens - prompt >= 2
        return "its response begins behind training.max_length" if cut else "response of less than two tokens"
    first = max(0, prompt - steps)
    return Expected(meta.sample_id, length - 2, length - 2 - first)


def plan_run(pool: Sequence[Sized], epochs: Iterable[Sequence[int]], batch_size: int, seed: int) -> Plan:
    """``epochs``: for each, which of ``pool`` it takes (indices). Each is shuffled by the seed, lengths alike
    within a step (:func:`tide_platform.training.data.plan_epoch`).
    """
    steps: list[PlannedStep] = []
    digest = hashlib.sha256()
    for epoch, chosen in enumerate(epochs):
        part = [pool[i] for i in chosen]
        order = plan_epoch(cast(Any, part), batch_size, seed * 1000 + epoch)
        for number, step in enumerate(order, start=1):
            samples = tuple(chosen[i] for i in step)
            steps.append(PlannedStep(epoch, number == len(order), samples))
            digest.update("\n".join(pool[i].sample_id for i in samples).encode() + b"\0")
    return Plan(steps, digest.hexdigest()[:16])


def count(reasons: Iterable[str]) -> dict[str, int]:
    """Reason -> how often."""
    return dict(Counter(reasons))
