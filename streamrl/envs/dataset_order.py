"""The order in which an env poses a finite set of problems: all of them once an epoch, without end.

The order of an epoch follows from seed and epoch alone. Number n is posed in epoch n // size, and
rank r of w poses the numbers r, r + w, r + 2w, ... Ranks therefore never meet, whatever their pace,
every problem is posed once an epoch, and a restart needs no more than the next number.
docs/design/grpo.md asks for such a sampler.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class DatasetIndex(NamedTuple):
    """The problem of a finite set that a problem number poses."""

    epoch: int
    problem: int  # its index in the set, from 0


def epoch_permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order of an epoch: (size,) int64, each problem from 0 to size - 1 once.

    Problems are sorted by the raw output of PCG64. numpy promises not to change that; it may
    change its shuffle.
    """
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(epoch,))
    keys = np.random.PCG64(sequence).random_raw(size)
    return np.argsort(keys, kind="stable")


class EpochOrder:
    """Maps problem numbers to problems, as an env needs it. The orders of two epochs are cached,
    as replicas are rarely further apart.
    """

    def __init__(self, seed: int, size: int) -> None:
        self.size = size
        self._permutation = lru_cache(maxsize=2)(lambda epoch: epoch_permutation(seed, epoch, size))

    def __call__(self, number: int) -> DatasetIndex:
        epoch, position = divmod(number, self.size)
        return DatasetIndex(epoch, int(self._permutation(epoch)[position]))
