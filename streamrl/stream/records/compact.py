"""Token ids in 2 or 3 bytes, and logprobs in 16 bits: how records hold them.

A record is written once and read several times, so whoever writes it makes it small, and whoever
computes with it makes it wide. What is between them only moves it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

THREE_BYTES = np.dtype("V3")  # an id, little-endian
STEPS = 2048  # of a logprob, from one to the next whole number
LOWEST = -(2**16 - 1) / STEPS  # that 16 bits hold, almost -32
HIGHEST = 1e-3  # One up to here is 0 and rounding. A higher one is wrong, and has to be seen.


def compact_ids(ids: np.ndarray) -> np.ndarray:
    """The ids in the fewest bytes that hold the largest: uint16, THREE_BYTES or uint32.

    `ids`: (n,) unsigned, or compact already. Returns the same shape.
    """
    if ids.dtype == THREE_BYTES or ids.dtype.itemsize <= 2:
        return ids
    largest = int(ids.max(initial=0))
    if largest < 1 << 16:
        return ids.astype("<u2")
    if largest < 1 << 24:
        whole = np.ascontiguousarray(ids, "<u4").view(np.uint8)
        compact = np.empty(3 * len(ids), np.uint8)
        for byte in range(3):
            compact[byte::3] = whole[byte::4]
        return compact.view(THREE_BYTES)
    return ids.astype("<u4", copy=False)


def wide_ids(ids: np.ndarray) -> np.ndarray:
    """The inverse of `compact_ids`: (n,) uint16 or uint32, to compute with."""
    if ids.dtype != THREE_BYTES:
        return ids
    # Four bytes are read at each id, of which the last belongs to the next one.
    data = np.zeros(3 * len(ids) + 4, np.uint8)
    data[: 3 * len(ids)] = np.ascontiguousarray(ids).view(np.uint8)
    return np.ndarray(len(ids), "<u4", data.data, strides=(3,)) & np.uint32(0xFFFFFF)


def join_ids(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All ids, one array after another: (sum of lengths,), compact."""
    filled = [array for array in arrays if len(array)] or list(arrays[:1])
    if len({array.dtype for array in filled}) > 1:
        filled = [wide_ids(array) for array in filled]
    return compact_ids(np.concatenate(filled))


def compact_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """The logprobs in 16 bits: (n,) uint16, the steps of 1/2048 below 0. They are rounded to the
    nearest step. They stay float32 where one is below -32, above 0 or not a number.

    `logprobs`: (n,) float32, or compact already.
    """
    if logprobs.dtype != np.float32:
        return logprobs
    if not LOWEST <= logprobs.min(initial=0) <= logprobs.max(initial=0) <= HIGHEST:
        return logprobs
    return np.rint(np.maximum(logprobs * np.float32(-STEPS), 0)).astype("<u2")


def wide_logprobs(logprobs: np.ndarray) -> np.ndarray:
    """The logprobs as (n,) float32, exactly those that the steps stand for."""
    if logprobs.dtype == np.float32:
        return logprobs
    return logprobs * np.float32(-1 / STEPS)


def join_logprobs(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All logprobs, one array after another: in 16 bits where all are, otherwise float32."""
    if len({array.dtype for array in arrays}) > 1:
        arrays = [wide_logprobs(array) for array in arrays]
    return np.concatenate(arrays)
