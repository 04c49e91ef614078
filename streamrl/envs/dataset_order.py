"""Which of a finite set of problems is posed next: all of them once an epoch, in an order of its
own, without end.

The order follows from seed and epoch alone. Number n is posed in epoch n // size, and rank r of w
poses the numbers r, r + w, r + 2w, ...; so ranks never meet, whatever their pace, every problem is
posed once an epoch, and a restart needs to know no more than the next number. docs/design/grpo.md
asks for such a sampler.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """What a number stands for."""

    epoch: int
    problem: int  # which of the set, from 0


def order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The problems of an epoch: (size,) int64, each of 0 to size - 1 once.

    Sorted by PCG64's raw output, which numpy promises not to change; its shuffle it may.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=(epoch,))).random_raw(
        size
    )
    return np.argsort(keys, kind="stable")


def share(seed: int, epoch: int, rank: int, world_size: int, size: int) -> np.ndarray:
    """What one rank poses in an epoch, in order. The ranks' shares are disjoint, and together they
    are all problems; they differ by one in length.

    For a sampler of your own in each of several processes; replicas of an env come to the same by
    their numbers. Raises ValueError for no such rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    return order(seed, epoch, size)[(rank - epoch * size) % world_size :: world_size]


class Epochs:
    """The same by numbers, for an env: two orders are kept, as replicas are rarely further apart."""

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        self._order = lru_cache(maxsize=2)(lambda epoch: order(seed, epoch, size))

    def __call__(self, number: int) -> Place:
        epoch, place = divmod(number, self.size)
        return Place(epoch, int(self._order(epoch)[place]))
