"""The one optimizer loop: plain torch, AdamW over fp32 masters.

Fine-tuning in the cycle, pretraining and training on samples of any origin all come here; they differ in
their plan, in where examples come from, and in whether the run is kept on disk.

A step's gradient is accumulated over micro-batches of at most ``MAX_POSITIONS`` positions, each
divided by N_j of the whole step; so ``batch_size`` samples a step is all there is to say, and memory does not
depend on it.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from tide_platform.config import TideError
from tide_platform.config.schema import Training
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.training.data import Example, NothingToTrain, collate, micro_batches
from tide_platform.training.loader import Feed, Fetch, feeding
from tide_platform.training.objective import DECAY, loss_and_stats
from tide_platform.training.plan import Plan, PlannedStep, count, plan_run
from tide_platform.training.progress import StepRecord, Stopped
from tide_platform.training.recovery import Recovery
from tide_platform.training.schedule import learning_rate
from tide_platform.training.state import State
from tide_platform.training.teacher import NO_HEADS, Heads
from tide_platform.training.world import Alone, World

MAX_POSITIONS = 8192  # of a micro-batch, each example counted as the longest
ALONE = Alone()

OnStep = Callable[[StepRecord], None]
Stop = Callable[[], bool]


class LossNotFinite(TideError):
    """The loss is infinite or not a number."""

    def __init__(self, step: int, sample_ids: list[str]):
        super().__init__(
            f"the loss of step {step} is not finite (samples {', '.join(sample_ids[:4])} ...); "
            "lower training.learning_rate, or look at these samples with `tide samples show`"
        )
        self.step, self.sample_ids = step, sample_ids


class _Abandoned(Exception):
    """A step was given up half way; it changed nothing."""


def train(
    draft: Eagle3Draft,
    embed_VH: torch.Tensor,
    examples: Sequence[Example],
    settings: Training,
    seed: int,
    on_step: OnStep | None = None,
    device: torch.device | str = "cpu",
) -> list[StepRecord]:
    """Trains ``draft`` in place, ``settings.epochs`` times over examples in memory; one record a step.

    Raises :class:`LossNotFinite`.
    """
    plan = plan_run(examples, [range(len(examples))] * settings.epochs, settings.batch_size, seed)
    return fit(
        draft, embed_VH, plan, lambda chosen: [examples[i] for i in chosen], settings, seed,
        on_step=on_step, device=device,
    )  # fmt: skip


def fit(
    draft: Eagle3Draft,
    embed_VH: torch.Tensor,
    plan: Plan,
    fetch: Fetch,
    settings: Training,
    seed: int,
    *,
    on_step: OnStep | None = None,
    recovery: Recovery | None = None,
    skipped: dict[str, str] | None = None,
    stop: Stop = lambda: False,
    heads: Heads = NO_HEADS,
    world: World = ALONE,
    device: torch.device | str = "cpu",
) -> list[StepRecord]:
    """Takes the plan's steps and trains ``draft`` in place; the records of all steps.

    ``embed_VH``: the target's embeddings, frozen. ``fetch``: the examples of a step, called from a thread.
    ``recovery`` makes the run resumable: it goes on where an earlier process was, and ``on_step`` is told of
    new steps alone. ``skipped`` (sample id -> why ``fetch`` left it out) goes into its checkpoints and is
    what :class:`NothingToTrain` reports. ``stop``: asked between micro-batches. ``heads``: what the
    examples' teacher needs.

    Raises :class:`LossNotFinite`, :class:`NothingToTrain` after an epoch in which no sample was usable, what
    ``recovery`` raises, and, with the run's state saved, :class:`Stopped` and what ``fetch`` and ``on_step``
    raise.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(settings.threads)
    draft.to(device).train()
    head_VH = None if heads.restricted_VH is None else heads.restricted_VH.to(device)
    run = _Run(State.begin(draft, settings), embed_VH.to(device), head_VH, plan, settings, world, stop)
    records: list[StepRecord] = []
    reasons = skipped if skipped is not None else {}
    if recovery:
        reasons |= recovery.restore(run.state).get("skipped", {})

    def save() -> None:
        if recovery:
            recovery.save(run.state, {"skipped": dict(reasons)})

    left = plan.steps[run.state.step :]
    with feeding(lambda chosen: fetch(world.share(chosen)), left, settings.prefetch_steps, stop) as feed:
        for planned in left:
            try:
                records.append(run.step(planned, feed))
            except LossNotFinite:
                raise
            except TideError:  # stopped, or samples cannot be had: the steps done are kept
                save()
                raise
            if (recovery is None or recovery.acknowledge(records[-1])) and on_step:
                try:
                    on_step(records[-1])
                except Exception:  # whoever listened is gone: a closed pipe, mostly
                    save()
                    raise
            if planned.last_of_epoch and not run.state.tokens:
                raise NothingToTrain(count(reasons.values()))
            if recovery and recovery.due():
                save()
    save()
    draft.eval()
    return recovery.acknowledged if recovery else records


class _Run:
    """One run's state and what its steps need."""

    def __init__(
        self,
        state: State,
        embed_VH: torch.Tensor,
        teacher_head_VH: torch.Tensor | None,
        plan: Plan,
        settings: Training,
        world: World,
        stop: Stop,
    ):
        self.state, self._embed_VH, self._settings = state, embed_VH, settings
        self._teacher_head_VH = teacher_head_VH
        self._steps, self._world, self._stop = len(plan.steps), world, stop

    def step(self, planned: PlannedStep, feed: Feed) -> StepRecord:
        """One optimizer step. Raises :class:`Stopped` with nothing changed, :class:`LossNotFinite`."""
        state, settings = self.state, self._settings
        got = feed.next()
        if got is None:
            raise Stopped(state.step, self._steps)
        examples, waited = got
        began = time.monotonic()
        rate = learning_rate(state.step, self._steps, settings)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        try:
            losses, accuracy = accumulate(
                state.draft, self._embed_VH, examples, settings, self._world, self._stop,
                self._teacher_head_VH,
            )  # fmt: skip
        except _Abandoned:
            state.optimizer.zero_grad(set_to_none=True)
            raise Stopped(state.step, self._steps) from None
        samples, tokens = self._world.total([len(examples), sum(e.response_tokens for e in examples)])
        norm = 0.0
        if samples:  # a step of which nothing is left updates nothing: not even by its moments
            norm = self._world.clip(state.parameters, settings.max_grad_norm)
            if not math.isfinite(norm):
                raise LossNotFinite(state.step + 1, [e.sample_id for e in examples])
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)
        computed = time.monotonic() - began
        state.step += 1
        state.tokens += int(tokens)
        state.seconds += waited + computed
        return StepRecord(
            step=state.step,
            steps=self._steps,
            epoch=planned.epoch,
            loss=sum(DECAY**j * x for j, x in enumerate(losses)),
            losses=losses,
            accuracy=accuracy,
            learning_rate=rate,
            grad_norm=norm,
            samples=int(samples),
            tokens=state.tokens,
            seconds=state.seconds,
            wait_seconds=waited,
            compute_seconds=computed,
        )


def accumulate(
    draft: Eagle3Draft,
    embed_VH: torch.Tensor,
    examples: Sequence[Example],
    settings: Training,
    world: World = ALONE,
    stop: Stop = lambda: False,
    teacher_head_VH: torch.Tensor | None = None,
) -> tuple[list[float], list[float]]:
    """Adds the gradient of one optimizer step; returns mean loss and accuracy of each unroll step.

    N_j is counted over all the examples first, so the result does not depend on how they are split or padded.
    """
    steps = settings.unroll_steps
    counts = [
        int(n) for n in world.total([sum(len(e.supervised[j]) for e in examples) for j in range(steps)])
    ]
    loss_sum, hit_sum = [0.0] * steps, [0] * steps
    for part in micro_batches(examples, MAX_POSITIONS):
        if stop():
            raise _Abandoned
        batch = collate(part).to(embed_VH.device)
        loss, stats = loss_and_stats(draft, embed_VH, batch, counts, settings.autocast, teacher_head_VH)
        loss.backward()
        loss_sum = [a + b for a, b in zip(loss_sum, stats.loss, strict=True)]
        hit_sum = [a + b for a, b in zip(hit_sum, stats.hits, strict=True)]
    return [s / max(n, 1) for s, n in zip(world.total(loss_sum), counts, strict=True)], [
        h / max(n, 1) for h, n in zip(world.total(hit_sum), counts, strict=True)
    ]
