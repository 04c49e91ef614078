"""Rescales advantages over a whole batch, for methods that need it (REINFORCE++).

A normalizer is pure. It maps `values` by the statistics of `over`, the batch's (rollouts,) float32
advantages. It is called for rollouts and, if tokens have advantages too, for tokens, so that both
stay on one scale. A function that is not shipped is named in the run file as MODULE:FUNCTION.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from streamrl.config.choices import BATCH_NORMALIZERS, NORMALIZED_ADVANTAGES
from streamrl.config.plugins import import_choice
from streamrl.stream.records import Batch, first_of_rollout_mask
from streamrl.stream.records.sequences import sampled_counts

BatchNormalizer = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (values, over)
ROUNDING = 1e-6  # a difference below it is rounding


def unchanged(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    """The advantages as the buffer made them."""
    return values


def normalized(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    """(A - mean) / std, both over the rollouts of the batch, with the population's std.
    REINFORCE++, arXiv:2501.03262.

    `values`: (m,) float32, `over`: (n,) float32. Returns (m,) float32. Where all rollouts are equal
    there is no scale to divide by, and equal values give 0.
    """
    if not len(over):
        return np.zeros(len(values), np.float32)
    exact = over.astype(np.float64)
    scale = float(exact.std())
    centred = values.astype(np.float64) - exact.mean()
    if scale > ROUNDING:
        return (centred / scale).astype(np.float32)
    return np.where(np.abs(centred) > ROUNDING, centred, 0.0).astype(np.float32)


# what a shipped buffer.advantage needs; those that are not here need none
NORMALIZER_OF = dict.fromkeys(NORMALIZED_ADVANTAGES, "normalize")


def normalizer_named(name: str) -> BatchNormalizer:
    """The shipped normalizer of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return import_choice(name, "batcher.advantage", BATCH_NORMALIZERS)


def normalize_batch(batch: Batch, normalizer: BatchNormalizer) -> Batch:
    """The batch with what the normalizer makes of its advantages, and of those of its tokens.
    Raises ValueError naming the batch when the result cannot be used.
    """
    # one value for each rollout that the policy gradient trains
    over = batch.advantages[first_of_rollout_mask(batch.uids) & policy_gradient_mask(batch)]
    advantages = _apply(normalizer, batch, batch.advantages, over)
    token_advantages = batch.token_advantages
    if token_advantages is not None:
        token_advantages = _apply(normalizer, batch, token_advantages, over)
    return msgspec.structs.replace(batch, advantages=advantages, token_advantages=token_advantages)


def policy_gradient_mask(batch: Batch) -> np.ndarray:
    """(n,) bool: the sequences that the policy gradient trains. The advantages of the others have
    no meaning.
    """
    if batch.policy_gradient_weights is None:
        return np.ones(len(batch.uids), bool)
    sequences = np.repeat(np.arange(len(batch.uids)), sampled_counts(batch))
    return np.bincount(sequences, batch.policy_gradient_weights, len(batch.uids)) > 0


def _apply(
    normalizer: BatchNormalizer, batch: Batch, values: np.ndarray, over: np.ndarray
) -> np.ndarray:
    result = normalizer(values, over)
    if result.shape != values.shape or not np.isfinite(result).all():
        raise ValueError(
            f"batch {batch.number}: batcher.advantage returned {result!r}, "
            f"expected {len(values)} finite numbers"
        )
    return result.astype(np.float32, copy=False)
