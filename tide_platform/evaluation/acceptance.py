"""What a draft's replay gives, and the acceptance length it amounts to. Pure: no torch.

Shapes: R roots (a round may start at each), K speculative steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """One sample's rounds at one number of speculative steps; expectations under the rule ``rejection``."""

    rounds: float
    accepted: float  # draft tokens that the stored text shows to be right
    hits: tuple[float, ...]  # hits[i]: rounds in which draft token i + 1 was accepted
    # cut[i]: rounds that came to the end of the text with i accepted draft tokens: of the others nothing is
    # known. At most one round of a sample, its last. Empty: none was
    cut: tuple[float, ...] = ()


@dataclass(frozen=True)
class RequestReplay:
    request_id: str
    sample_id: str
    tokens: int  # response tokens in the sample
    by_k: dict[int, KReplay]  # speculative steps -> what they would bring
    roots: int = 0  # positions at which a round can start: a round covers 1 to k + 1 of them
    captured_at: float = 0.0  # Unix time, seconds
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)  # dimension -> values (slices.py)
    slack: float = 0.0  # rule rejection: how far the target's probabilities are unknown, nats (rejection.py)


def acceptance_length(replays: Sequence[RequestReplay], k: int) -> float:
    """``1 + accepted drafts / verify rounds``, sums over all. Raises :class:`NothingToReplay`."""
    accepted, rounds = counts(replays, k).sum(0)
    if not rounds:
        raise NothingToReplay(len(replays))
    return float(1 + accepted / rounds)


def acceptance_by_position(replays: Sequence[RequestReplay], k: int) -> list[float]:
    """For each draft position: share of rounds in which it was accepted, given that the one before was.

    Rounds whose text ended before that position are left out of both (Kaplan & Meier 1958).
    """
    reached = [sum(r.by_k[k].rounds for r in replays)]
    reached += [sum(r.by_k[k].hits[i] for r in replays) for i in range(k)]
    cut = [sum(_cut(r.by_k[k], i) for r in replays) for i in range(k)]
    at_risk = [n - lost for n, lost in zip(reached, cut, strict=False)]
    return [hit / of if of > 0 else 0.0 for (_, hit), of in zip(pairwise(reached), at_risk, strict=True)]


def counts(replays: Sequence[RequestReplay], k: int) -> np.ndarray:
    """Accepted drafts and verify rounds of each replay as the server counts them, float64 [requests, 2].

    The server also counts drafts that it accepts past the end of a response. Those are not in the stored
    text: a round that was cut there is given what rounds of ``replays`` that came as far went on to accept.
    """
    found = np.array([(r.by_k[k].accepted, r.by_k[k].rounds) for r in replays], float).reshape(-1, 2)
    if not any(any(r.by_k[k].cut) for r in replays):
        return found
    rates = acceptance_by_position(replays, k)
    more = [float(np.cumprod(rates[i:]).sum()) for i in range(k)]  # expected, of a round that was cut at i
    found[:, 0] += [sum(_cut(r.by_k[k], i) * more[i] for i in range(k)) for r in replays]
    return found


def walk(match_RK: np.ndarray, root_ok_R: np.ndarray, k: int, known_R: np.ndarray | None = None) -> KReplay:
    """The server's walk over one response.

    ``match_RK[r, i]``: draft token i + 1 of the chain at root r equals the stored token (False past the end);
    root r is the one of the round that starts when r + 1 response tokens are out. ``root_ok_R``: false where
    the root was not captured (a hole): that token is passed over, uncounted. ``known_R``: how many tokens
    behind each root are stored; without it, as many as there are roots from it on.
    """
    known_R = _to_the_end(len(match_RK)) if known_R is None else known_R
    leading = np.cumprod(match_RK[:, :k], axis=1).sum(1)
    hits, cut = np.zeros(k, np.int64), np.zeros(k, np.int64)
    rounds = accepted = r = 0
    while r < len(leading):
        if not root_ok_R[r]:
            r += 1
            continue
        a = int(leading[r])
        if a < k and a == known_R[r]:
            cut[a] += 1
        rounds, accepted, r = rounds + 1, accepted + a, r + a + 1
        hits[:a] += 1
    return KReplay(rounds, accepted, tuple(hits.tolist()), tuple(cut.tolist()))


def expected_walk(
    chance_RK: np.ndarray, root_ok_R: np.ndarray, k: int, known_R: np.ndarray | None = None
) -> KReplay:
    """:func:`walk` where draft token i + 1 at root r is accepted with probability ``chance_RK[r, i]``, given
    that those before it were: the expected counts.

    Forward dynamic programming over the roots: ``visit[r]`` is the probability that a round starts there.
    """
    roots = len(chance_RK)
    known_R = _to_the_end(roots) if known_R is None else known_R
    visit = np.zeros(roots + k + 2)
    visit[0] = 1.0
    hits, cut, rounds = np.zeros(k), np.zeros(k), 0.0
    for r in range(roots):
        if not root_ok_R[r]:
            visit[r + 1] += visit[r]
            continue
        judged = min(k, int(known_R[r]))
        reach = visit[r] * np.cumprod(np.concatenate([[1.0], chance_RK[r, :judged]]))  # [judged + 1]
        rounds += visit[r]
        hits[:judged] += reach[1:]
        ends_here = reach - np.concatenate([reach[1:], [0.0]])
        visit[r + 1 : r + judged + 2] += ends_here
        if judged < k:
            cut[judged] += reach[judged]
    return KReplay(rounds, float(hits.sum()), tuple(hits.tolist()), tuple(cut.tolist()))


def _to_the_end(roots: int) -> np.ndarray:
    return np.arange(roots, 0, -1)


def _cut(replay: KReplay, i: int) -> float:
    return replay.cut[i] if i < len(replay.cut) else 0
