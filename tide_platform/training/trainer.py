"""The one optimizer loop: plain torch, AdamW over fp32 masters.

Fine-tuning in the cycle, pretraining and training on samples of any origin all come here; they differ in
their plan, in where examples come from, and in whether the run is kept on disk.

A step's gradient is accumulated over micro-batches of at most ``micro_batch_positions`` positions, each
divided by N_j of the whole step; so ``batch_size`` samples a step is all there is to say, and memory does not
depend on it. Neither does the result depend on the number of processes: ``batch_size`` is of all of them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from tide_platform.config import TideError
from tide_platform.config.schema import Training
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.training.data import Example, NothingToTrain, collate, micro_batches
from tide_platform.training.led import Keeping
from tide_platform.training.loader import Feed, Fetch, feeding
from tide_platform.training.objective import DECAY, Objective
from tide_platform.training.plan import Plan, PlannedStep, count, plan_run
from tide_platform.training.progress import StepRecord, Stopped
from tide_platform.training.schedule import learning_rate
from tide_platform.training.state import State
from tide_platform.training.teacher import NO_HEADS, Heads
from tide_platform.training.world import Alone, World, together, whole

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


class OutOfMemory(TideError):
    """The GPU has no room for a micro-batch."""

    def __init__(self, positions: int, error: Exception):
        super().__init__(
            f"the GPU is out of memory with micro-batches of {positions} positions ({str(error)[:200]}); "
            "lower training.micro_batch_positions, which changes memory and not the result, or "
            "training.max_length"
        )
        self.positions = positions


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
        on_step=on_step, world=Alone(device),
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
    recovery: Keeping | None = None,
    skipped: dict[str, str] | None = None,
    stop: Stop = lambda: False,
    heads: Heads = NO_HEADS,
    world: World = ALONE,
    judge: Callable[[Mapping[str, str]], None] = lambda skipped: None,
) -> list[StepRecord]:
    """Takes the plan's steps and trains ``draft`` in place; the records of all steps.

    ``embed_VH``: the target's embeddings, frozen. ``fetch``: the examples of a step, called from a thread.
    ``recovery`` makes the run resumable: it goes on where an earlier process was, and ``on_step`` is told of
    new steps alone. ``skipped`` (sample id -> why ``fetch`` left it out) goes into its checkpoints and is
    what :class:`NothingToTrain` reports. ``stop``: asked between micro-batches; of several processes, between
    steps. ``heads``: what the examples' teacher needs. ``world``: the processes that share each step, all of
    which call this; ``on_step`` is called in the first. ``judge`` raises where too much was ``skipped`` by
    all of them.

    Raises :class:`LossNotFinite`, :class:`OutOfMemory`, :class:`NothingToTrain` after an epoch in which no
    sample was usable, what ``recovery`` raises, and, with the run's state saved, :class:`Stopped` and what
    ``fetch``, ``judge`` and ``on_step`` raise; what another process raised is
    :class:`~tide_platform.training.world.PeerFailed`.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(settings.threads)
    draft.to(world.device).train()
    head_VH = None if heads.restricted_VH is None else heads.restricted_VH.to(world.device)
    objective = Objective(draft, embed_VH.to(world.device), settings.autocast, head_VH)
    run = _Run(objective, plan, settings, world, stop)
    records: list[StepRecord] = []
    reasons = skipped if skipped is not None else {}
    if recovery:
        reasons |= recovery.restore(run.state).get("skipped", {})

    def save() -> None:
        if recovery:
            recovery.save(run.state, {"skipped": world.union(reasons)})

    def tell(record: StepRecord) -> None:
        if on_step:
            on_step(record)

    judged = 0.0

    def look_at_skipped() -> None:
        nonlocal judged
        if world.size > 1 and (number := world.total([len(reasons)])[0]) != judged:
            judged = number
            judge(world.union(reasons))

    left = plan.steps[run.state.step :]
    with feeding(lambda chosen: fetch(world.share(chosen)), left, settings.prefetch_steps, stop) as feed:
        for planned in left:
            try:
                records.append(run.step(planned, feed))
            except (LossNotFinite, OutOfMemory):
                raise
            except TideError:  # stopped, or samples cannot be had: the steps done are kept
                save()
                raise
            record = records[-1]
            new = recovery is None or recovery.acknowledge(record)
            try:
                if new:
                    world.led(lambda record=record: tell(record))
                look_at_skipped()
            except Exception:  # whoever listened is gone (a closed pipe, mostly), or too much is damaged
                save()
                raise
            if planned.last_of_epoch and not run.state.tokens:
                raise NothingToTrain(count(world.union(reasons).values()))
            if recovery and recovery.due():
                save()
    save()
    run.give_back(draft)
    draft.eval()
    return recovery.acknowledged if recovery else records


class _Run:
    """One run's state and what its steps need."""

    def __init__(self, objective: Objective, plan: Plan, settings: Training, world: World, stop: Stop):
        self._module = world.spread(objective)
        held = cast(Objective, getattr(self._module, "module", self._module))  # of a wrapper, what it wraps
        self.state, self._settings = State.begin(held.draft, settings), settings
        self._steps, self._world, self._stop = len(plan.steps), world, stop

    def step(self, planned: PlannedStep, feed: Feed) -> StepRecord:
        """One optimizer step, of all processes or of none.

        Raises :class:`Stopped` with nothing changed, :class:`LossNotFinite`, what the fetching raised.
        """
        state, settings = self.state, self._settings
        examples, waited = self._next(feed)
        began = time.monotonic()
        rate = learning_rate(state.step, self._steps, settings)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        try:
            losses, accuracy = accumulate(self._module, examples, settings, self._world, self._stop)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(settings.micro_batch_positions, error) from error
        except _Abandoned:
            state.optimizer.zero_grad(set_to_none=True)
            raise Stopped(state.step, self._steps) from None
        samples, tokens = self._world.total([len(examples), sum(e.response_tokens for e in examples)])
        norm = 0.0
        if samples:  # a step of which nothing is left updates nothing: not even by its moments
            clipped = torch.nn.utils.clip_grad_norm_(state.parameters, settings.max_grad_norm)
            norm = float(whole(clipped))  # of all processes: their gradients are summed already
            if not math.isfinite(norm):
                everyones = self._world.union({e.sample_id: "" for e in examples})
                raise LossNotFinite(state.step + 1, sorted(everyones))
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

    def _next(self, feed: Feed) -> tuple[list[Example], float]:
        """The step's examples of this process, and the seconds waited, once all processes have theirs."""
        began = time.monotonic()
        got = together(self._world, feed.next)
        if self._world.most(got is None):
            raise Stopped(self.state.step, self._steps)
        assert got is not None
        return got, time.monotonic() - began

    def give_back(self, draft: Eagle3Draft) -> None:
        """Puts the weights into ``draft`` where a copy of it was trained."""
        trained = self.state.draft
        if trained is not draft:
            weights = {name: whole(tensor.detach()) for name, tensor in trained.state_dict().items()}
            draft.load_state_dict(weights)


def accumulate(
    objective: torch.nn.Module,
    examples: Sequence[Example],
    settings: Training,
    world: World = ALONE,
    stop: Stop = lambda: False,
) -> tuple[list[float], list[float]]:
    """Adds the gradient of one optimizer step; returns mean loss and accuracy of each unroll step.

    ``objective``: an :class:`Objective`, as ``world`` spread it. ``examples``: this process's own. N_j is
    counted over all the examples first, so the result does not depend on how they are split or padded. All
    processes take as many micro-batches, some of them empty: a gradient is summed by all or waited for.
    """
    steps = settings.unroll_steps
    counts = [
        int(n) for n in world.total([sum(len(e.supervised[j]) for e in examples) for j in range(steps)])
    ]
    loss_sum, hit_sum = [0.0] * steps, [0] * steps
    parts = micro_batches(examples, settings.micro_batch_positions)
    most = world.most(len(parts))
    for number in range(most):
        if world.size == 1 and stop():  # of several, one must not leave alone
            raise _Abandoned
        batch = collate(parts[number]) if number < len(parts) else None
        with world.accumulating(objective, last=number == most - 1):
            loss, stats = objective(batch, counts)
            (loss * world.size).backward()  # several processes average their gradients
        loss_sum = [a + b for a, b in zip(loss_sum, stats.loss, strict=True)]
        hit_sum = [a + b for a, b in zip(hit_sum, stats.hits, strict=True)]
    return [s / max(n, 1) for s, n in zip(world.total(loss_sum), counts, strict=True)], [
        h / max(n, 1) for h, n in zip(world.total(hit_sum), counts, strict=True)
    ]
