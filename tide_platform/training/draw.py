"""Which samples of a larger pool an epoch takes: by the seed, and others in each epoch."""

import random
from collections.abc import Iterable


def drawn(pool: Iterable[str], share: int, epoch: int, seed: int, salt: str) -> list[str]:
    """``share`` sample ids of the pool for one epoch; the whole pool where it holds no more.

    Epochs walk through one shuffled order, so that every sample had its turn before one comes again: what
    protects from forgetting is how many different general samples are replayed. ``salt`` keeps pools that are
    drawn by the same seed apart. The order of ``pool`` does not matter.
    """
    order = sorted(pool)
    if share >= len(order):
        return order
    random.Random(f"{salt}:{seed}").shuffle(order)
    first = epoch * share
    return [order[(first + i) % len(order)] for i in range(share)]
