"""The components of the loss: how much the policy gradient, the cross entropy and the divergence
from a teacher count at each token, so that reinforcement learning, supervised fine-tuning and
distillation mix in one batch.

The weights are part of the batch, so they are a decision that is recorded. Where a batch has none,
the policy gradient alone trains, with weight 1. The decomposition is that of prime-rl.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamrl.learner.model.examples import RlExample


class Components(NamedTuple):
    """The weights of some rows, (rows, max_seq_len) float32 each and 0 outside the loss mask."""

    policy_gradient: jax.Array
    cross_entropy: jax.Array
    teacher_kl: jax.Array


def components_of(example: RlExample) -> Components | None:
    """The weights of the losses, or None where the policy gradient alone trains."""
    weights = (
        example.policy_gradient_weights,
        example.cross_entropy_weights,
        example.teacher_kl_weights,
    )
    if all(array is None for array in weights):
        return None
    mask = jnp.asarray(example.loss_mask)
    none = jnp.zeros_like(mask)
    return Components(
        *(
            default if array is None else jnp.asarray(array)
            for array, default in zip(weights, (mask, none, none), strict=True)
        )
    )


def sampled_mask(mask: jax.Array, components: Components | None) -> jax.Array:
    """(rows, max_seq_len) float32: 1 where the policy's own sample trains.

    A token that only the cross entropy trains may be anybody's. It is neither weighed nor rejected
    by its distance from the policy that sampled, and no divergence is estimated there.
    """
    if components is None:
        return mask
    return mask * ((components.policy_gradient > 0) | (components.teacher_kl > 0))


def cross_entropy(current: jax.Array) -> jax.Array:
    """-log p(token): (rows, max_seq_len) float32, of the logprobs under the model in training."""
    return -current


def compared_mask(example: RlExample) -> np.ndarray:
    """(rows, max_seq_len) bool: where the advantage trains, so that its scale matters."""
    gradient = example.policy_gradient_weights
    return example.loss_mask > 0 if gradient is None else gradient > 0
