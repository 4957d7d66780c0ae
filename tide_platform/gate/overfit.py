"""Check ``overfit``: one captured sample, learnt by heart, is accepted at full length by the running server.

It goes the whole way that a cycle goes: captured sample, training, export, reload, serving. The draft under
test is the parent, its vocabulary map kept; so a text is taken whose tokens are all in its vocabulary. Each
row of the teacher is made certain of its first choice, which is what a greedy server says: learning by heart
is then a matter of seconds, and a draft that has learnt it all must be right at every position.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tide_platform.capture.record import Sample
from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.gate.example import Answer, Example, Seen
from tide_platform.gate.report import Check, Tolerance, failed, judged
from tide_platform.training import data, trainer

EPOCHS = 60  # of one sample: optimizer steps
TRIES = 4  # times EPOCHS
LEARNING_RATE = 1e-3
FULL = Tolerance(0.0, "draft tokens not accepted; one that is right everywhere is accepted everywhere")


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
    ready = data.prepare(_certain(lesson.example.sample), inverse, steps, lesson.length)
    if isinstance(ready, str):
        return parent, 0.0
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


def _certain(sample: Sample) -> Sample:
    """The sample with a teacher that has no doubt of its first choice."""
    logp_MK = np.full_like(sample.tensors["teacher_logp"], -1e4)
    logp_MK[:, 0] = 0.0
    return Sample(sample.meta, sample.tensors | {"teacher_logp": logp_MK})


def check_served(answer: Answer, lesson: Lesson, k: int, exact: bool) -> Check:
    """Whether the server's answer is the learnt one, and every draft token of every round was accepted.

    ``exact``: the server computes in fp32, so it must say the same again. In bf16 a near tie of the target's
    own may fall the other way in another batch; then the rounds before it are judged.
    """
    wanted = lesson.example.answer.output[: lesson.new_tokens]
    same = next(
        (i for i, (a, b) in enumerate(zip(answer.output, wanted, strict=False)) if a != b), len(wanted)
    )
    if same < len(wanted) and exact:
        return failed(
            "overfit",
            "server",
            f"after the reload the server says something else from token {same} on: verification is not "
            "lossless, or the target was changed",
        )
    judged_parts = [part for part in answer.seen if 1 + part.rounds + part.accepted <= same]
    part = judged_parts[-1] if judged_parts else Seen(())
    if part.rounds < 2:
        return failed(
            "overfit", "server", f"only {part.rounds} rounds said what was learnt: nothing is shown"
        )
    length = 1 + part.accepted / part.rounds
    return judged(
        "overfit",
        "server",
        float(k * part.rounds - part.accepted),
        FULL,
        f"{part.rounds} rounds, acceptance length {length:g} of {k + 1}: accepted at full length",
        f"a draft that is right at every position of the sample is accepted at {length:.2f} of {k + 1}: "
        "export, reload or serving change what was trained",
        {"rounds": part.rounds, "accepted": part.accepted, "tokens": same},
    )
