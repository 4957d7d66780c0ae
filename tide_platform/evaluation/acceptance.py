"""What a draft's replay gives, and the acceptance length it amounts to. Pure: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tide_platform.config import TideError


class NothingToReplay(TideError):
    """No verify round in any of the samples: an acceptance length would be 0 / 0."""

    def __init__(self, samples: int):
        super().__init__(
            f"no verify round in {samples} samples: every response is shorter than two tokens; "
            "capture longer ones"
        )
        self.samples = samples


@dataclass(frozen=True)
class KReplay:
    """One sample's rounds at one number of speculative steps."""

    rounds: int
    accepted: int  # draft tokens
    hits: tuple[int, ...]  # hits[i]: rounds in which draft token i + 1 was accepted


@dataclass(frozen=True)
class RequestReplay:
    request_id: str
    sample_id: str
    tokens: int  # response tokens in the sample
    by_k: dict[int, KReplay]  # speculative steps -> what they would bring


def acceptance_length(replays: Sequence[RequestReplay], k: int) -> float:
    """``1 + accepted drafts / verify rounds``, sums over all. Raises :class:`NothingToReplay`."""
    rounds = sum(r.by_k[k].rounds for r in replays)
    if not rounds:
        raise NothingToReplay(len(replays))
    return 1 + sum(r.by_k[k].accepted for r in replays) / rounds


def acceptance_by_position(replays: Sequence[RequestReplay], k: int) -> list[float]:
    """For each draft position: share of rounds in which it was accepted, given that the one before was."""
    reached = [sum(r.by_k[k].rounds for r in replays)]
    reached += [sum(r.by_k[k].hits[i] for r in replays) for i in range(k)]
    return [b / a if a else 0.0 for a, b in pairwise(reached)]


def walk(match_RK: np.ndarray, root_ok_R: np.ndarray, k: int) -> KReplay:
    """The server's walk over one response.

    ``match_RK[r, i]``: draft token i + 1 of the chain at root r equals the stored token (False past the end);
    root r is the one of the round that starts when r + 1 response tokens are out. ``root_ok_R``: false where
    the root was not captured (a hole): that token is passed over, uncounted.
    """
    leading = np.cumprod(match_RK[:, :k], axis=1).sum(1)
    hits = np.zeros(k, np.int64)
    rounds = accepted = r = 0
    while r < len(leading):
        if not root_ok_R[r]:
            r += 1
            continue
        a = int(leading[r])
        rounds, accepted, r = rounds + 1, accepted + a, r + a + 1
        hits[:a] += 1
    return KReplay(rounds, accepted, tuple(hits.tolist()))
