"""What is done about a fault: started again, started again smaller, or the end."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from tide_platform.cluster.faults import Answer, LostTooOften, MemoryNotEnough, PodFault
from tide_platform.config.cluster import TrainerPods
from tide_platform.training.job import TrainJob

LEAST_POSITIONS = 64  # of training.micro_batch_positions


def with_policy(
    pods: TrainerPods, job: Path, attempt: Callable[[int], None], say: Callable[[str], None]
) -> None:
    """Calls ``attempt(1)``, ``attempt(2)``, ... until one returns. Training resumes by itself, from what the
    job's folder holds.

    Raises the fault that ends it, :class:`LostTooOften`, :class:`MemoryNotEnough`, and whatever else an
    attempt raises.
    """
    lost = shrinks = 0
    for number in count(1):
        try:
            return attempt(number)
        except PodFault as fault:
            if fault.answer is Answer.AGAIN:
                lost += 1
                if lost > pods.max_lost:
                    raise LostTooOften(fault, pods.max_lost) from fault
                say(f"{fault}; started again ({lost} of {pods.max_lost}), training goes on where it was")
            elif fault.answer is Answer.SMALLER:
                shrinks += 1
                former = TrainJob.read(job).settings.training.micro_batch_positions
                if shrinks > pods.max_shrinks or former <= LEAST_POSITIONS:
                    raise MemoryNotEnough(fault, former) from fault
                smaller = shrink(job)
                say(
                    f"{fault}; started again ({shrinks} of {pods.max_shrinks}) with "
                    f"training.micro_batch_positions {smaller} in place of {former}"
                )
            else:
                raise


def on_gpu(job: Path) -> None:
    """Has the job file ask for GPUs: pods that were granted some fail where they see none, in place of
    training on the CPU for days.
    """
    read = TrainJob.read(job)
    if read.settings.training.device != "cuda":
        read.settings.training.device = "cuda"
        read.write(job)


def shrink(job: Path) -> int:
    """Halves the job file's ``training.micro_batch_positions``; the new value."""
    read = TrainJob.read(job)
    smaller = max(LEAST_POSITIONS, read.settings.training.micro_batch_positions // 2)
    read.settings.training.micro_batch_positions = smaller
    read.write(job)
    return smaller
