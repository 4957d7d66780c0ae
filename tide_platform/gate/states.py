"""Checks of the captured states: ``capture``, ``layers`` and ``norm``.

Shapes: R captured rows, H hidden size, F = 3H.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tide_platform.gate.example import Example
from tide_platform.gate.reference import Reference
from tide_platform.gate.report import Check, Tolerance, failed, judged, passed

# by kind of reference
STATES = {
    "transformers": Tolerance(
        4e-3, "bf16 keeps 8 bits of a value: half a unit is 2e-3 of it, rows add fp32 noise"
    ),
    "engine": Tolerance(
        6e-2, "two bf16 passes of other batch shapes round each layer differently; the worst row is taken"
    ),
}
PLACES = ("low", "middle", "high")


def check_capture(examples: Sequence[Example], aux_layer_ids: tuple[int, ...]) -> Check:
    """Whether there is a row of every position that the server computed, of the text that the client saw."""
    for example in examples:
        answer, tensors = example.answer, example.sample.tensors
        text = [*answer.prompt, *answer.output]
        if tensors["input_ids"].tolist() != text:
            return failed("capture", "capture", f"{answer.rid}: captured tokens are not those of the answer")
        rows, wanted = tensors["row_pos"].tolist(), list(range(len(text) - 1))
        if rows[: len(wanted)] != wanted:
            gone = sorted(set(wanted) - set(rows))
            return failed("capture", "capture", f"{answer.rid}: no row of positions {gone[:5]} and others")
        if example.stream.aux_layer_ids != aux_layer_ids:
            return failed(
                "capture",
                "capture",
                f"samples say aux layers {list(example.stream.aux_layer_ids)}, the draft "
                f"{list(aux_layer_ids)}",
            )
        if example.sample.meta.verify_rounds != answer.rounds:
            said = f"{example.sample.meta.verify_rounds} verify rounds, the client was told {answer.rounds}"
            return failed("capture", "capture", f"{answer.rid}: the sample says {said}")
    rows = sum(len(example.sample.tensors["row_pos"]) for example in examples)
    return passed("capture", "capture", f"{len(examples)} samples, {rows} rows, no hole")


def check_layers(
    examples: Sequence[Example], references: Sequence[Reference], aux_layer_ids: tuple[int, ...]
) -> list[Check]:
    """One check an aux layer: the captured rows against the state entering that layer; where they aren't it,
    the layer whose state they are is named, if there is one.
    """
    return [_check_layer(examples, references, n, layer) for n, layer in enumerate(aux_layer_ids)]


def check_norm(
    examples: Sequence[Example], references: Sequence[Reference], aux_layer_ids: tuple[int, ...]
) -> Check:
    """Whether aux states were taken before, and the last state after, their norm."""
    tolerance = STATES[references[0].kind]
    if references[0].before_norm_TH is None:
        return passed("norm", "capture", "not known to this reference; `--reference transformers` knows it")
    for number, layer in enumerate(aux_layer_ids):
        if _error(examples, references, number, lambda r, at=layer: r.normed[at]) <= tolerance.limit:
            return failed(
                "norm",
                "capture",
                f"aux layer {number} ({PLACES[number]}): captured states are post-norm, after layer "
                f"{layer}'s input norm; a draft reads the pre-norm residual stream",
            )
    last = [_last_error(e, r, r.last_hidden_TH) for e, r in zip(examples, references, strict=True)]
    stored = [error for error in last if error is not None]
    if not stored:
        return passed("norm", "capture", "aux states are pre-norm; no last hidden state is stored")
    wrong = [_last_error(e, r, r.before_norm_TH) for e, r in zip(examples, references, strict=True)]
    if max(stored) > tolerance.limit and max(w for w in wrong if w is not None) <= tolerance.limit:
        return failed(
            "norm",
            "capture",
            "last hidden state: captured pre-norm for post-norm, before the final norm; lm_head of it does "
            "not give the target's logits",
            {"error_post_norm": max(stored)},
        )
    return judged(
        "norm",
        "capture",
        max(stored),
        tolerance,
        "aux states are pre-norm, the last hidden state is post-norm",
        "the last hidden state is neither the reference's before nor after the final norm",
    )


def _check_layer(
    examples: Sequence[Example], references: Sequence[Reference], number: int, layer: int
) -> Check:
    tolerance = STATES[references[0].kind]
    errors = {
        other: _error(examples, references, number, lambda r, at=other: r.entering[at])
        for other in sorted(references[0].entering)
    }
    own, best = errors[layer], min(errors, key=lambda other: errors[other])
    name = f"aux layer {number} ({PLACES[number]})"
    if best != layer and errors[best] <= tolerance.limit:
        fault = (
            f"{name} matches the input of layer {best}, the configuration says {layer}: layer ids are off by "
            f"{best - layer:+d}"
        )
    else:
        fault = f"{name} is the state of no layer: nearest to the input of layer {best} ({errors[best]:.3f})"
    near = {str(other): errors[other] for other in (layer - 1, layer, layer + 1) if other in errors}
    return judged(
        "layers", "capture", own, tolerance, f"{name} is the input of layer {layer}", fault, {"error": near}
    )


def _error(
    examples: Sequence[Example],
    references: Sequence[Reference],
    number: int,
    of: Callable[[Reference], torch.Tensor],
) -> float:
    """Worst relative error (L2) of a row of aux layer ``number``, over all examples."""
    worst = 0.0
    for example, reference in zip(examples, references, strict=True):
        tensors, wanted_TH = example.sample.tensors, of(reference)
        width = wanted_TH.shape[1]
        part_RH = to_float(tensors["aux"])[:, number * width : (number + 1) * width]
        rows = torch.from_numpy(tensors["row_pos"].astype(np.int64))
        known = rows < len(wanted_TH)
        worst = max(worst, relative_error(part_RH[known], wanted_TH[rows[known]]))
    return worst


def _last_error(example: Example, reference: Reference, wanted_TH: torch.Tensor | None) -> float | None:
    """Of the stored last hidden states; None where the stream has none."""
    stored = example.sample.tensors.get("last_hidden")
    if stored is None or not stored.size or wanted_TH is None:
        return None
    rows = torch.from_numpy(example.sample.tensors["teacher_pos"].astype(np.int64))
    return relative_error(to_float(stored), wanted_TH[rows])


def relative_error(found_RH: torch.Tensor, wanted_RH: torch.Tensor) -> float:
    """The worst row's: length of the difference over the length of what is wanted."""
    if not found_RH.isfinite().all():
        return float("inf")
    return float(((found_RH - wanted_RH).norm(dim=1) / wanted_RH.norm(dim=1).clamp_min(1e-6)).max())


def to_float(bits: np.ndarray) -> torch.Tensor:
    """fp32 of bf16 bit patterns."""
    return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16).float()
