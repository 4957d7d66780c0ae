"""Phases of the demo: what each is expected to take on two cores, and what it took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """``expected_s``: seconds on two cores of a 2020s server processor."""

    name: str
    title: str
    expected_s: float


class Clock:
    """Times phases in the order in which they happen."""

    def __init__(self, phases: list[Phase], say: Callable[[str], None]):
        self._phases = {phase.name: phase for phase in phases}
        self._say = say
        self.began = time.monotonic()
        self.seconds: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as ``name``; a phase entered twice adds up."""
        phase = self._phases[name]
        self._say(f"[{_minutes(self.elapsed)}] {phase.title} (about {phase.expected_s:.0f} s)")
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 1)

    def left_after(self, name: str) -> float:
        """Seconds that the phases behind ``name`` are expected to take."""
        names = list(self._phases)
        return sum(self._phases[later].expected_s for later in names[names.index(name) + 1 :])

    def total(self) -> dict[str, float]:
        return self.seconds | {"total": round(self.elapsed, 1)}


class Pace:
    """How much slower this machine is than the one that the expected seconds are of."""

    def __init__(self) -> None:
        self._expected = self._took = 0.0

    def add(self, expected_s: float, took_s: float) -> None:
        self._expected, self._took = self._expected + expected_s, self._took + took_s

    @property
    def factor(self) -> float:
        """1 on a machine as fast as expected, or faster, or not known yet."""
        return max(1.0, self._took / self._expected) if self._expected else 1.0


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
