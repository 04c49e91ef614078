"""The one place that normalises: what each sampled token counts in the loss of its batch. The loss
is then the sum of weight times value.

Weights are made of the whole batch, before it is split over micro-batches, devices and processes.
So any split adds up to the same gradient, and the denominators are here to be seen. Each function
takes `mask` (rows, max_seq_len) float32, 1 where a token trains, and `rollouts` (rows, max_seq_len)
int, the number of each position's rollout (`numbers_of`), and returns (rows, max_seq_len) float32
weights, 0 outside the mask. A rollout that forked has several sequences; they are one rollout here,
wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Average = Callable[[np.ndarray, np.ndarray], np.ndarray]


def token_mean(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """1 / T, with T the sampled tokens of the batch: every token counts the same, so long rollouts
    count for more.

    DAPO, arXiv:2503.14476, section 3.3; docs/design/logprobs.md.
    """
    return mask / np.float32(max(mask.sum(dtype=np.float64), 1.0))


def rollout_mean(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """1 / (N * n_i): summed over a rollout's own length n_i, then over the N rollouts of the batch.
    GRPO, arXiv:2402.03300, equation 19.

    docs/design/grpo.md: the loss is summed per sample over its length, the gradient divided by the
    samples of all processes.
    """
    lengths = _rollout_lengths(mask, rollouts)
    return mask / (np.maximum(lengths, 1) * max(_rollout_count(mask, rollouts), 1)).astype(
        np.float32
    )


def constant_length(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """1 / (N * max_seq_len): as `over_samples`, but no rollout's length decides what its tokens
    count. Dr. GRPO, arXiv:2503.20783.
    """
    return mask / np.float32(mask.shape[1] * max(_rollout_count(mask, rollouts), 1))


def segment_numbers(segment_ids: np.ndarray) -> np.ndarray:
    """A number for each segment, and one for each row's padding: (rows, max_seq_len) int64. For
    rows in which no rollout has forked.
    """
    rows, length = segment_ids.shape
    return segment_ids + np.arange(rows, dtype=np.int64)[:, None] * (length + 1)


def _rollout_lengths(mask: np.ndarray, rollouts: np.ndarray) -> np.ndarray:
    """Each token's rollout's number of sampled tokens: (rows, max_seq_len) float64."""
    return np.bincount(rollouts.ravel(), weights=mask.ravel())[rollouts]


def _rollout_count(mask: np.ndarray, rollouts: np.ndarray) -> int:
    """Rollouts of the batch that have something to train on."""
    return len(np.unique(rollouts[mask > 0]))


AVERAGES: dict[str, Average] = {
    "tokens": token_mean,
    "samples": rollout_mean,
    "constant": constant_length,
}
