"""Acceptance replay (design 4.4): from stored samples alone, the acceptance that a server with this draft
would show.

Every response position is given a chain of the draft, in one batched pass. Then the response is walked as the
server walks it: a round at root t accepts a(t) draft tokens and emits a(t) + 1, so the next root is
t + a(t) + 1.

- Rules ``greedy`` and ``target_only``: SGLang's chains are the draft's argmax tokens at any temperature, and
  the emitted token has the target's distribution, whatever the draft; a draft token is accepted iff it is
  that token. So draft token i is accepted iff it equals the stored one: exact.
- Rule ``rejection``: the draft draws its tokens, so the stored text leaves open whether it drew this one;
  expected counts by dynamic programming (rejection.py).

What the server counts past the end of a response is not in the text. If the row of the last token was kept
(the server's own stop fell inside an accepted run), a greedy request's next token is known from its teacher;
beyond, :func:`~tide_platform.evaluation.acceptance.counts` sets in what is to be expected.
"""

import copy
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from tide_platform.capture.record import Sample
from tide_platform.config import TideError
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.evaluation.acceptance import (
    KReplay,
    RequestReplay,
    acceptance_by_position,
    acceptance_length,
    expected_walk,
    walk,
)
from tide_platform.evaluation.chains import chains, first_root, match_chains, next_token
from tide_platform.evaluation.rejection import (
    TargetChances,
    acceptance_chances,
    target_chances,
    text_log_probabilities,
)
from tide_platform.evaluation.slices import labels

__all__ = ["acceptance_by_position", "acceptance_length", "not_replayable", "replay"]

EQUALITY, REJECTION = ("greedy", "target_only"), "rejection"


class UnsupportedVerifyRule(TideError):
    """A sample whose rule the walk does not follow."""

    def __init__(self, sample_id: str, rule: str):
        known = " and ".join((*EQUALITY, REJECTION))
        super().__init__(f"sample {sample_id} was verified by {rule!r}; acceptance replay follows {known}")
        self.sample_id, self.rule = sample_id, rule


class NotReplayable(TideError):
    """A sample that does not hold what its rule needs."""

    def __init__(self, sample_id: str, reason: str):
        super().__init__(f"sample {sample_id}: {reason}; leave it out (not_replayable tells)")
        self.sample_id, self.reason = sample_id, reason


def replay(
    draft: Eagle3Draft,
    target: TargetParts,
    samples: Iterable[Sample],
    k_max: int,
    batch_positions: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
) -> list[RequestReplay]:
    """What the draft would have accepted in each sample, for every k in 1..``k_max``, in the order given.

    ``batch_positions``: padded positions a pass (memory). ``dtype``: precision of the serving draft.
    Raises :class:`UnsupportedVerifyRule`, and :class:`NotReplayable` for what :func:`not_replayable` names.
    """
    model = copy.deepcopy(draft).to(dtype).eval()
    embed_VH = target.embed_VH.to(dtype)
    results: list[RequestReplay] = []
    for group in _groups(samples, batch_positions):
        if group[0].meta.verify_rule == REJECTION:
            temperatures = [s.meta.temperature or 1.0 for s in group]  # SGLang's draft draws at 1 if greedy
            log_q = text_log_probabilities(
                model, embed_VH, chains(model, embed_VH, group, k_max), temperatures
            )
            results += [
                _expected(s, log_q_RK, target_chances(s, target), k_max)
                for s, log_q_RK in zip(group, log_q, strict=True)
            ]
        else:
            matches = match_chains(model, embed_VH, group, k_max)
            results += [_walked(s, match_RK, k_max) for s, match_RK in zip(group, matches, strict=True)]
    return results


def not_replayable(sample: Sample) -> str | None:
    """Why a sample cannot be replayed under its rule, ``None`` where it can."""
    if sample.meta.verify_rule != REJECTION:
        return None
    changed = [flag for flag in ("penalties", "grammar") if flag in sample.meta.flags]
    if changed:
        return f"the target's probabilities were changed by {changed[0]}, the raw ones are stored"
    return None


def _walked(sample: Sample, match_RK: np.ndarray, k_max: int) -> RequestReplay:
    ok_R, known_R = _captured(sample, len(match_RK)), _known(sample, len(match_RK))
    return _request(sample, ok_R, {k: walk(match_RK, ok_R, k, known_R) for k in range(1, k_max + 1)})


def _expected(sample: Sample, log_q_RK: np.ndarray, target: TargetChances, k_max: int) -> RequestReplay:
    ok_R = _captured(sample, len(log_q_RK))
    first = first_root(sample) + sample.meta.start_pos
    chance_RK, told_R = acceptance_chances(log_q_RK, target, first)
    known_R = np.minimum(_known(sample, len(log_q_RK)), told_R)
    by_k = {k: expected_walk(chance_RK, ok_R, k, known_R) for k in range(1, k_max + 1)}
    return _request(sample, ok_R, by_k, target.slack)


def _captured(sample: Sample, roots: int) -> np.ndarray:
    at = np.arange(roots) + first_root(sample) + sample.meta.start_pos
    return np.isin(at, sample.tensors["row_pos"])


def _known(sample: Sample, roots: int) -> np.ndarray:
    """[R] how many tokens that a chain at each root proposes are known."""
    return np.arange(roots, 0, -1) + len(next_token(sample))


def _request(sample: Sample, ok_R: np.ndarray, by_k: dict[int, KReplay], slack: float = 0.0) -> RequestReplay:
    meta = sample.meta
    response = meta.start_pos + meta.num_tokens - max(meta.prompt_tokens, meta.start_pos)
    return RequestReplay(
        request_id=meta.request_id,
        sample_id=meta.sample_id,
        tokens=max(0, response),
        by_k=by_k,
        roots=int(ok_R.sum()),
        captured_at=meta.captured_at,
        labels=labels(meta),
        slack=slack,
    )


def _groups(samples: Iterable[Sample], batch_positions: int) -> Iterator[list[Sample]]:
    """Consecutive samples with a round to replay, of one kind of rule, at most ``batch_positions`` padded
    positions a group.
    """
    group: list[Sample] = []
    for sample in samples:
        rule = sample.meta.verify_rule
        if rule not in (*EQUALITY, REJECTION):
            raise UnsupportedVerifyRule(sample.meta.sample_id, rule)
        if reason := not_replayable(sample):
            raise NotReplayable(sample.meta.sample_id, reason)
        if sample.meta.num_tokens - 2 <= first_root(sample):
            continue
        longest = max(s.meta.num_tokens for s in [*group, sample])
        other = bool(group) and (group[0].meta.verify_rule == REJECTION) != (rule == REJECTION)
        if group and (other or longest * (len(group) + 1) > batch_positions):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group
