"""Loss normalization: the weight of each sampled token. The loss of a batch is the sum of weight
times value, and nothing else normalizes.

Weights are computed over the whole batch, before it is split over micro-batches, devices and
processes. So every split adds up to the same gradient, and all denominators are in this file. Each
function takes `mask` (rows, max_seq_len) float32, which is 1 where a token trains, and `rollouts`
(rows, max_seq_len) int, the number of the rollout at each position (`segment_numbers`). It returns
(rows, max_seq_len) float32 weights, 0 outside the mask. A rollout that forked has several
sequences, possibly in several rows; here they are one rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

Average = Callable[[np.ndarray, np.ndarray], np.ndarray]


def token_mean(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """1 / T, with T the number of sampled tokens in the batch. Every token has the same weight, so
    long rollouts count for more.

    DAPO, arXiv:2503.14476, section 3.3; docs/design/logprobs.md.
    """
    return mask / np.float32(max(mask.sum(dtype=np.float64), 1.0))


def rollout_mean(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """1 / (N * n_i): the mean over the n_i tokens of a rollout, then over the N rollouts of the
    batch. GRPO, arXiv:2402.03300, equation 19.

    docs/design/grpo.md: the loss is divided by a rollout's length, and the gradient by the number
    of rollouts in all processes.
    """
    lengths = _rollout_lengths(mask, rollouts)
    return mask / (np.maximum(lengths, 1) * max(_rollout_count(mask, rollouts), 1)).astype(
        np.float32
    )


def constant_length(mask: np.ndarray, rollouts: np.ndarray, length: int) -> np.ndarray:
    """1 / (N * length): like `rollout_mean`, but with the same divisor for all rollouts, whatever
    their length. `length` is the run's `batcher.max_seq_len`, also in a batch of shorter rows.
    Dr. GRPO, arXiv:2503.20783.
    """
    return mask / np.float32(length * max(_rollout_count(mask, rollouts), 1))


def segment_numbers(segment_ids: np.ndarray) -> np.ndarray:
    """A number for each segment, and one for the padding of each row: (rows, max_seq_len) int64.
    This is for batches in which no rollout has forked.
    """
    rows, length = segment_ids.shape
    return segment_ids + np.arange(rows, dtype=np.int64)[:, None] * (length + 1)


def _rollout_lengths(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """The number of sampled tokens of the rollout at each position: (rows, max_seq_len) float64."""
    return np.bincount(rollouts.ravel(), weights=mask.ravel())[rollouts]


def _rollout_count(mask: np.ndarray, rollouts: np.ndarray) -> int:
    """The number of rollouts in the batch that have at least one token to train on."""
    return len(np.unique(rollouts[mask > 0]))


AVERAGES: dict[str, Average] = {"tokens": token_mean, "samples": rollout_mean}


def average_named(name: str, length: int) -> Average:
    """The average of that name (`learner.average`). `length`: that of `constant_length`."""
    if name == "constant":
        return partial(constant_length, length=length)
    return AVERAGES[name]
