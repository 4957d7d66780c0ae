"""The states of a window, which may follow which, and how a window is named (design 4.6)."""

from dataclasses import dataclass
from enum import StrEnum

from tide_platform.config import TideError

SEPARATOR = "/"  # Dagster allows it in partition keys and its UI escapes it


class State(StrEnum):
    """Where a window stands."""

    OWED = "owed"  # cut, no checkpoint yet
    RUNNING = "running"  # a run trains it
    TRAINED = "trained"  # its challenger is stored
    GATED = "gated"  # the challenger passed against a named champion
    DEPLOYED = "deployed"  # the challenger is served
    REJECTED = "rejected"  # the gate said no: a valid end
    FAILED = "failed"  # its attempts are used up, or somebody cancelled its run
    SUPERSEDED = "superseded"  # a later window was trained in its place (`window.policy: latest`)
    MERGED = "merged"  # its samples went into a later window (`window.policy: merge`)

    @property
    def final(self) -> bool:
        return self in FINAL


FINAL = frozenset({State.DEPLOYED, State.REJECTED, State.FAILED, State.SUPERSEDED, State.MERGED})
OPEN = frozenset(State) - FINAL
REOPENS = frozenset({State.FAILED, State.REJECTED, State.SUPERSEDED})  # by hand

# what the ledger's transitions may do; a claim by hand of a failed, rejected or superseded
# window opens it again
FOLLOWS: dict[State, frozenset[State]] = {
    State.OWED: frozenset({State.RUNNING, State.FAILED, State.SUPERSEDED, State.MERGED}),
    State.RUNNING: frozenset({State.TRAINED, State.OWED, State.FAILED}),
    State.TRAINED: frozenset({State.GATED, State.REJECTED, State.FAILED}),
    State.GATED: frozenset({State.GATED, State.DEPLOYED, State.REJECTED, State.FAILED}),
    # deployed: its rollout was finished after its attempts had run out
    State.FAILED: frozenset({State.RUNNING, State.TRAINED, State.GATED, State.DEPLOYED}),
    State.REJECTED: frozenset({State.RUNNING}),
    State.DEPLOYED: frozenset(),
    State.SUPERSEDED: frozenset({State.RUNNING}),
    State.MERGED: frozenset(),
}


class BadWindowKey(TideError):
    """A partition key that is no ``deployment/window``."""

    def __init__(self, text: str):
        super().__init__(f"{text!r} is no window; a window's key is deployment/name, as in demo/w00001")
        self.text = text


@dataclass(frozen=True, order=True)
class WindowKey:
    """``deployment/window``: the ledger's key and Dagster's partition key."""

    deployment: str
    window: str

    def __str__(self) -> str:
        return f"{self.deployment}{SEPARATOR}{self.window}"

    @classmethod
    def parse(cls, text: str) -> "WindowKey":
        """Raises :class:`BadWindowKey`."""
        deployment, separator, window = text.partition(SEPARATOR)
        if not (deployment and separator and window) or SEPARATOR in window:
            raise BadWindowKey(text)
        return cls(deployment, window)


def window_name(index: int) -> str:
    """Name of a deployment's ``index``-th window, from 1; names sort in the order of cutting."""
    return f"w{index:05d}"


class NotTrained(TideError):
    """A step that needs the window's checkpoint, before there is one."""

    def __init__(self, key: WindowKey):
        super().__init__(
            f"window {key} has no checkpoint yet; run draft_checkpoint first (job adapt_draft does)"
        )
        self.key = key
