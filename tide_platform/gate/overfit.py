"""Check ``overfit``: one captured sample, learnt by heart, is accepted at full length by the running server.

It goes the whole way that a cycle goes: captured sample, training, export, reload, serving. The draft under
test is the parent, its vocabulary map kept; so a text is taken whose tokens are all in its vocabulary. Each
row of the teacher is made certain of its first choice, which is what a greedy server says: learning by heart
is then a matter of seconds, and a draft that has learnt it all must be right at every position.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.gate.example import Answer, Example
from tide_platform.gate.report import Check, Tolerance, failed, judged
from tide_platform.training import data, trainer

EPOCHS = 60  # of one sample: optimizer steps
TRIES = 4  # times EPOCHS
LEARNING_RATE = 1e-3
FULL = Tolerance(0.0, "a draft that is right everywhere is accepted everywhere, in every round")


@dataclass(frozen=True)
class Lesson:
    """What is learnt: the first ``new_tokens`` of an answer, all of them in the draft's vocabulary."""

    example: Example
    new_tokens: int  # 1 + a whole number of rounds of k + 1

    @property
    def length(self) -> int:
        return len(self.example.answer.prompt) + self.new_tokens

    def rounds(self, k: int) -> int:
        return (self.new_tokens - 1) // (k + 1)


def choose_lesson(examples: Sequence[Example], inverse: np.ndarray, k: int) -> Lesson | None:
    """The longest that there is; None where no answer begins with two rounds of tokens that the draft has.

    ``inverse``: target id -> draft id or -1. The token after the prompt is the target's own, whatever it is.
    """
    best: Lesson | None = None
    for example in examples:
        known = inverse[np.array(example.answer.output)] >= 0
        unknown = np.flatnonzero(~known[1:])
        covered = 1 + (int(unknown[0]) if len(unknown) else len(known) - 1)
        rounds = (covered - 1) // (k + 1)
        if rounds >= 2 and (best is None or 1 + rounds * (k + 1) > best.new_tokens):
            best = Lesson(example, 1 + rounds * (k + 1))
    return best


def learn(
    parent: Eagle3Draft, target: TargetParts, lesson: Lesson, inverse: np.ndarray, settings: Training, k: int
) -> tuple[Eagle3Draft, float]:
    """``(the draft that was trained, its accuracy on the sample: the worst unroll step's)``; ``parent`` stays
    as it is.
    """
    steps = max(k, settings.unroll_steps)
    ready = data.prepare(lesson.example.sample, inverse, steps, lesson.length)
    if isinstance(ready, str):
        return parent, 0.0
    certain = torch.zeros_like(ready.teacher_p_MK)
    certain[:, 0] = 1.0
    ready = replace(ready, teacher_p_MK=certain)
    changes = {
        "unroll_steps": steps,
        "epochs": EPOCHS,
        "batch_size": 1,
        "learning_rate": LEARNING_RATE,
        "min_lr_ratio": 1.0,
        "autocast": False,
    }
    plan, draft, accuracy = settings.model_copy(update=changes), copy.deepcopy(parent), 0.0
    for _ in range(TRIES):
        records = trainer.train(draft, target.embed_VH.float(), [ready], plan, seed=settings.seed)
        accuracy = min(records[-1].accuracy[:k])
        if accuracy == 1.0:
            break
    return draft, accuracy


def check_served(answer: Answer, lesson: Lesson, k: int) -> Check:
    """Whether the server's answer is the learnt one, taken in as few rounds as there can be."""
    wanted = lesson.example.answer.output[: lesson.new_tokens]
    if answer.output != wanted:
        at = next(i for i, (a, b) in enumerate(zip(answer.output, wanted, strict=False)) if a != b)
        return failed(
            "overfit",
            "server",
            f"after the reload the server says something else from token {at} on: verification is not "
            "lossless, or the target was changed",
        )
    rounds, most = lesson.rounds(k), k + 1
    length = 1 + answer.accepted / answer.rounds if answer.rounds else 0.0
    return judged(
        "overfit",
        "server",
        float(answer.rounds - rounds),
        FULL,
        f"{rounds} rounds, acceptance length {length:g} of {most}: accepted at full length",
        f"a draft that is right at every position of the sample is accepted at {length:.2f} of {most} "
        f"({answer.rounds} rounds in place of {rounds}): export, reload or serving change what was trained",
        {"rounds": answer.rounds, "accepted": answer.accepted, "tokens": lesson.new_tokens},
    )
