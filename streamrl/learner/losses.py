"""Per-token losses. Each is pure, takes arrays of one shape, and returns an array of that shape; `masked_mean` alone normalises.

Notation: `current`, `policy`, `reference` are logprobs of the same tokens under the model being trained, the policy that sampled them, and the
reference; ratio = exp(current - policy). A loss is minimised, so good tokens have negative ones.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from streamrl.imports import import_path

Loss = Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array]
Divergence = Callable[[jax.Array, jax.Array], jax.Array]


def ratio(current: jax.Array, policy: jax.Array) -> jax.Array:
    """exp(current - policy): (...) float32."""
    return jnp.exp(current - policy)


def clipped_ratio(current: jax.Array, policy: jax.Array, advantages: jax.Array, clip_epsilon: float) -> jax.Array:
    """-clip(ratio, 1 - eps, 1 + eps) * A: the loss of design document 000. All arrays (...) float32; returns (...) float32.

    Outside the clip range its gradient is 0 whatever the sign of A.
    """
    return -jnp.clip(ratio(current, policy), 1 - clip_epsilon, 1 + clip_epsilon) * advantages


def ppo(current: jax.Array, policy: jax.Array, advantages: jax.Array, clip_epsilon: float) -> jax.Array:
    """-min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A). All arrays (...) float32; returns (...) float32. PPO, arXiv:1707.06347, equation 7.

    The minimum keeps the gradient where a step has made things worse than the clip range allows.
    """
    unclipped = ratio(current, policy)
    return -jnp.minimum(unclipped * advantages, jnp.clip(unclipped, 1 - clip_epsilon, 1 + clip_epsilon) * advantages)


def k1(current: jax.Array, reference: jax.Array) -> jax.Array:
    """current - reference: unbiased for KL(current || reference), high variance. Document 000's term."""
    return current - reference


def k2(current: jax.Array, reference: jax.Array) -> jax.Array:
    """(current - reference)^2 / 2: biased, low variance, never negative. Schulman 2020, "Approximating KL divergence"."""
    return jnp.square(current - reference) / 2


def k3(current: jax.Array, reference: jax.Array) -> jax.Array:
    """exp(d) - d - 1 with d = reference - current: unbiased, low variance, never negative. Schulman 2020; GRPO, arXiv:2402.03300, equation 4."""
    d = reference - current
    return jnp.exp(d) - d - 1


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """sum(values * mask) / sum(mask): the one place that normalises, over the tokens of the whole batch. An empty mask gives 0. Returns a scalar."""
    return jnp.sum(jnp.where(mask > 0, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1.0)


LOSSES: dict[str, Loss] = {"ppo": ppo, "clipped-ratio": clipped_ratio}
DIVERGENCES: dict[str, Divergence] = {"k1": k1, "k2": k2, "k3": k3}


def loss_named(name: str) -> Loss:
    """The shipped loss of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return LOSSES.get(name) or import_path(name, "learner.loss", LOSSES)


def divergence_named(name: str) -> Divergence:
    """The shipped estimator of that name, or the one at MODULE:FUNCTION. Raises ConfigError."""
    return DIVERGENCES.get(name) or import_path(name, "learner.kl", DIVERGENCES)
