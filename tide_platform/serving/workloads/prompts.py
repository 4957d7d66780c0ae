"""A prompt, where it belongs, and how prompts are divided once and for all."""

import hashlib
from dataclasses import dataclass

from tide_platform.config import TideError

TRAFFIC, HELD_OUT = "traffic", "held_out"
SPLITS = (TRAFFIC, HELD_OUT)
HELD_OUT_SHARE = 0.15


class WorkloadError(TideError):
    """A workload that is not known, cannot be read, or has no prompts of the wanted split."""


@dataclass(frozen=True)
class Prompt:
    """What is sent to the server."""

    id: str
    messages: list[dict[str, str]]  # [{"role", "content"}], as chat templates take them


@dataclass(frozen=True)
class WorkloadPrompt:
    """One line of a built workload."""

    id: str
    split: str  # traffic | held_out
    template: str  # prompts of one template are alike, and where it matters all on one side
    prompt: str


def position(text: str) -> float:
    """Where a text falls in [0, 1): by its hash, so the same on every machine and whatever else is there."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def hashed_split(key: str) -> str:
    """``held_out`` for 15 % of all keys."""
    return HELD_OUT if position(key) < HELD_OUT_SHARE else TRAFFIC


def digest(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
