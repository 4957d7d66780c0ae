"""Checks of what a trainer learns from the captured example: ``teacher`` and ``mask``.

Shapes: M teacher rows, K kept log-probabilities, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tide_platform.gate.example import Example
from tide_platform.gate.reference import Reference
from tide_platform.gate.report import Check, Tolerance, failed, judged, passed
from tide_platform.training.data import prepare

# largest |difference| of a log-probability, less RELATIVE of its size (float16 holds 11 bits)
RELATIVE = 2e-3
TEACHER = {
    "transformers": Tolerance(0.02, "nats; float16 storage, logits of fp32 runs that sum in another order"),
    "engine": Tolerance(0.25, "nats; logits of two bf16 passes of other batch shapes"),
}
SHIFTS = (-2, -1, 1, 2)


def check_teacher(examples: Sequence[Example], references: Sequence[Reference]) -> Check:
    """Captured top-K log-probabilities against the log-softmax of the reference's raw logits."""
    tolerance = TEACHER[references[0].kind]
    pairs = list(zip(examples, references, strict=True))
    worst = max(_teacher_error(e, _logp(r), 0) for e, r in pairs)
    fault = "they are of no run of this target: captured after penalties or temperature, or another target's"
    if worst > tolerance.limit and references[0].logp_TV is not None:
        wrong = [r.logp_before_norm_TV for r in references if r.logp_before_norm_TV is not None]
        if max(_teacher_error(e, w, 0) for e, w in zip(examples, wrong, strict=True)) <= tolerance.limit:
            fault = (
                "they are of logits taken pre-norm for post-norm: lm_head of the state before the final norm"
            )
        for shift in SHIFTS:
            if max(_teacher_error(e, _logp(r), shift) for e, r in pairs) <= tolerance.limit:
                fault = f"each row is that of position {shift:+d}: teacher rows are shifted"
    return judged(
        "teacher",
        "capture",
        worst,
        tolerance,
        "top-K log-probabilities are the reference's, and its largest",
        f"teacher rows are off by {worst:.2f} nats: {fault}",
    )


def check_mask(examples: Sequence[Example], inverse: np.ndarray, steps: int) -> Check:
    """The trainer's supervised positions against the rule of design 4.3, counted from what the client sent
    and got, position by position.

    ``inverse``: target id -> draft id or -1. ``steps``: of the unroll.
    """
    count = 0
    for example in examples:
        wanted = expected_pairs(example, inverse, steps)
        found = trained_pairs(example, inverse, steps)
        if isinstance(found, str):
            if any(wanted):
                text = f"{example.answer.rid}: the trainer leaves the sample out ({found})"
                return failed("mask", "capture", f"{text}, {len(wanted[0])} positions are to be supervised")
            continue
        for step, (have, want) in enumerate(zip(found, wanted, strict=True)):
            if have != want:
                return failed("mask", "capture", _mask_fault(example, step, have, want))
        count += len(found[0])
    if not count:
        return failed(
            "mask",
            "capture",
            "no position of the controlled example is supervised: mask coverage is 0 %; the draft's "
            "vocabulary covers none of its answers, or no teacher row was captured",
        )
    return passed("mask", "capture", f"{count} supervised positions at step 0, all those of the answers")


def expected_pairs(example: Example, inverse: np.ndarray, steps: int) -> list[set[tuple[int, int]]]:
    """For each step j the (t, position of the teacher row) to be supervised, straight from the rule: x[t+1+j]
    and x[t+2+j] are response tokens, the teacher row t+1+j exists and its argmax is in the draft's
    vocabulary.
    """
    first = len(example.answer.prompt)
    end = first + len(example.answer.output)
    tensors = example.sample.tensors
    rows = set(tensors["row_pos"].tolist())
    teacher = dict(zip(tensors["teacher_pos"].tolist(), tensors["teacher_ids"][:, 0].tolist(), strict=True))
    steps_of: list[set[tuple[int, int]]] = []
    for j in range(steps):
        pairs = set()
        for t in range(end):
            embedded, predicted = t + 1 + j, t + 2 + j
            both = first <= embedded and predicted < end
            if both and t in rows and embedded in teacher and inverse[teacher[embedded]] >= 0:
                pairs.add((t, embedded))
        steps_of.append(pairs)
    return steps_of


def trained_pairs(example: Example, inverse: np.ndarray, steps: int) -> list[set[tuple[int, int]]] | str:
    """The same as the trainer has it; or why it leaves the sample out."""
    sample = example.sample
    ready = prepare(sample, inverse, steps, sample.meta.num_tokens)
    if isinstance(ready, str):
        return ready
    first = ready.context - ready.roots + ready.start
    positions = sample.tensors["teacher_pos"]
    return [{(int(root) + first, int(positions[row])) for root, row in pairs} for pairs in ready.supervised]


def _mask_fault(example: Example, step: int, have: set[tuple[int, int]], want: set[tuple[int, int]]) -> str:
    where = f"{example.answer.rid}, step {step}"
    have_t, want_t = sorted(t for t, _ in have), sorted(t for t, _ in want)
    if have_t and want_t and {have_t[0] - want_t[0], have_t[-1] - want_t[-1]} & set(SHIFTS):
        return (
            f"{where}: shifted mask: positions {have_t[0]} to {have_t[-1]} are supervised, the response's "
            f"are {want_t[0]} to {want_t[-1]}"
        )
    if have_t == want_t:
        moved = {b - a for a, b in zip(sorted(p for _, p in want), sorted(p for _, p in have), strict=True)}
        return f"{where}: right positions learn from wrong teacher rows ({sorted(moved)} away)"
    extra, gone = sorted(set(have_t) - set(want_t)), sorted(set(want_t) - set(have_t))
    return f"{where}: mask: supervised though not to be {extra[:5]}, not supervised though to be {gone[:5]}"


def _logp(reference: Reference) -> torch.Tensor | dict[int, dict[int, float]]:
    return reference.logp if reference.logp_TV is None else reference.logp_TV


def _teacher_error(example: Example, logp: torch.Tensor | dict[int, dict[int, float]], shift: int) -> float:
    """Largest |difference| beyond RELATIVE, of the captured ids and of the reference's own largest K."""
    tensors = example.sample.tensors
    found_MK = torch.from_numpy(tensors["teacher_logp"].astype(np.float32))
    if not found_MK.isfinite().all():
        return float("inf")
    if isinstance(logp, dict):
        return _error_of_some(tensors, found_MK, logp)
    at = torch.from_numpy(tensors["teacher_pos"].astype(np.int64)) + shift
    inside = (at >= 0) & (at < len(logp))
    rows_MV, found_MK = logp[at[inside]], found_MK[inside]
    ids_MK = torch.from_numpy(tensors["teacher_ids"].astype(np.int64))[inside]
    own_MK, top_MK = rows_MV.gather(1, ids_MK), rows_MV.topk(ids_MK.shape[1]).values
    return max(_beyond(found_MK, own_MK), _beyond(found_MK, top_MK))


def _error_of_some(
    tensors: dict[str, np.ndarray], found_MK: torch.Tensor, logp: dict[int, dict[int, float]]
) -> float:
    """Where the reference tells the likely tokens only; a captured first choice that is none of them is off
    without bound.
    """
    worst = 0.0
    for m, position in enumerate(tensors["teacher_pos"].tolist()):
        known = logp.get(position)
        if known is None:
            continue
        if int(tensors["teacher_ids"][m, 0]) not in known:
            return float("inf")
        for token, found in zip(tensors["teacher_ids"][m].tolist(), found_MK[m].tolist(), strict=True):
            if token in known:
                worst = max(worst, abs(found - known[token]) - RELATIVE * abs(known[token]))
    return worst


def _beyond(found_MK: torch.Tensor, wanted_MK: torch.Tensor) -> float:
    return float(((found_MK - wanted_MK).abs() - RELATIVE * wanted_MK.abs()).max())
