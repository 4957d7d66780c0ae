"""Samples on their way to the optimizer: read and prepared by a thread while the last step computes.

Plain threads: Lance, checksums and most of numpy's work release the interpreter's lock, and a fork would copy
the store's handles and torch's threads. At most ``prefetch_steps`` steps wait, and ``cache_bytes`` of
examples are kept for later epochs; the rest is read again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, Full, Queue
from threading import Event, Thread

import numpy as np
import torch

from tide_platform.capture.record import Sample
from tide_platform.config import TideError
from tide_platform.config.schema import Training
from tide_platform.training.data import Example, prepare
from tide_platform.training.plan import PlannedStep, count
from tide_platform.training.samples import Samples
from tide_platform.training.teacher import NO_HEADS, Heads

Fetch = Callable[[Sequence[int]], list[Example]]  # of indices into the pool; what cannot be used is left out

NO_POSITION = "no supervised position"  # the one reason that is no damage
_POLL_S = 0.2
_PATIENCE_S = 5.0


class TooManyDamaged(TideError):
    """More samples are damaged than a run may leave out."""

    def __init__(self, damaged: dict[str, str], planned: int, share: float):
        some = "; ".join(f"{name}: {reason}" for name, reason in list(damaged.items())[:3])
        reasons = ", ".join(f"{n} x {reason}" for reason, n in count(damaged.values()).items())
        super().__init__(
            f"{len(damaged)} of {planned} samples cannot be used ({reasons}), more than "
            f"training.max_damaged_share {share:g} allows; first: {some}; look at them with "
            "`tide samples show`"
        )
        self.damaged, self.planned, self.share = damaged, planned, share


class FetchBroke(TideError):
    """The thread that reads samples ended by something that is no error of Python's."""

    def __init__(self, error: BaseException):
        super().__init__(f"reading samples broke: {type(error).__name__}: {error}")
        self.error = error


class Loader:
    """Examples of a pool of samples. Its calls come from one thread at a time."""

    def __init__(
        self,
        samples: Samples,
        pool: Sequence[int],
        inverse: np.ndarray,
        settings: Training,
        heads: Heads = NO_HEADS,
        processes: int = 1,
    ):
        """``pool``: which samples, indices; ``inverse``: target -> draft id or -1, [V]; ``heads``: what the
        teacher ``settings.teacher`` needs; ``processes``: that share the pool, so that none can judge alone
        whether too many are damaged (:meth:`judge`).
        """
        self._samples, self._pool, self._inverse, self._heads = samples, pool, inverse, heads
        self._alone = processes == 1
        self._settings, self._room = settings, settings.cache_bytes
        self._kept: dict[int, Example] = {}
        self.skipped: dict[str, str] = {}  # sample id -> why it was left out

    def __call__(self, chosen: Sequence[int]) -> list[Example]:
        """The usable examples among these indices into the pool, in order.

        Raises :class:`TooManyDamaged`, and what the store raises where it does not answer.
        """
        missing = [i for i in chosen if i not in self._kept and self._name(i) not in self.skipped]
        fresh: dict[int, Example] = {}
        for i, item in zip(missing, self._samples.load([self._pool[i] for i in missing]), strict=True):
            made = self._prepare(item) if isinstance(item, Sample) else item
            if isinstance(made, Example):
                fresh[i] = made
                self._keep(i, made)
            else:
                self._skip(i, made)
        return [e for i in chosen if (e := fresh.get(i) or self._kept.get(i)) is not None]

    def _prepare(self, sample: Sample) -> Example | str:
        settings = self._settings
        return prepare(
            sample, self._inverse, settings.unroll_steps, settings.max_length,
            settings.teacher, self._heads.whole_VH,
        )  # fmt: skip

    def _keep(self, index: int, example: Example) -> None:
        """First come, first kept: in epochs of another order each, replacing gains nothing."""
        size = example_bytes(example)
        if size <= self._room:
            self._room -= size
            self._kept[index] = example

    def _skip(self, index: int, reason: str) -> None:
        self.skipped[self._name(index)] = reason
        if self._alone:
            self.judge(self.skipped)

    def judge(self, skipped: Mapping[str, str]) -> None:
        """``skipped``: of all processes. Raises :class:`TooManyDamaged`."""
        damaged = {name: why for name, why in skipped.items() if why != NO_POSITION}
        share = self._settings.max_damaged_share
        if len(damaged) > share * len(self._pool):
            raise TooManyDamaged(damaged, len(self._pool), share)

    def _name(self, index: int) -> str:
        return self._samples.metas[self._pool[index]].sample_id


def example_bytes(example: Example) -> int:
    """Memory that an example's tensors take."""
    values = [*vars(example).values(), *vars(example.teacher).values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(t.nbytes for t in tensors) + sum(pairs.nbytes for pairs in example.supervised)


class Feed:
    """Steps' examples in the plan's order, fetched ahead."""

    def __init__(self, ready: "Queue[list[Example] | Exception]", stop: Callable[[], bool]):
        self._ready, self._stop = ready, stop

    def next(self) -> list[Example] | None:
        """The next step's examples; None: asked to stop meanwhile. Raises what the fetching raised."""
        while not self._stop():
            try:
                item = self._ready.get(timeout=_POLL_S)
            except Empty:
                continue
            if isinstance(item, Exception):
                raise item
            return item
        return None


@contextmanager
def feeding(
    fetch: Fetch, steps: Sequence[PlannedStep], ahead: int, stop: Callable[[], bool]
) -> Iterator[Feed]:
    """Fetches the steps one after another in a thread that ends with the block; ``ahead`` of them wait at
    most.
    """
    ready: Queue[list[Example] | Exception] = Queue(maxsize=ahead)
    ended = Event()

    def put(item: "list[Example] | Exception") -> bool:
        while not ended.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return True
            except Full:
                continue
        return False

    def work() -> None:
        try:
            for step in steps:
                if ended.is_set() or not put(fetch(step.samples)):
                    return
        except Exception as error:  # noqa: BLE001 (handed to the thread that asks)
            put(error)
        except BaseException as error:  # noqa: BLE001 (a panic of Lance's, for one: nobody must wait for it)
            put(FetchBroke(error))

    thread = Thread(target=work, name="samples", daemon=True)
    thread.start()
    try:
        yield Feed(ready, stop)
    finally:
        ended.set()
        thread.join(_PATIENCE_S)  # a store that does not answer must not keep the process
