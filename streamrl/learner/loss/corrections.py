"""Off-policy corrections, for rollouts that were sampled by an older version of the model, or by an
engine that computes slightly different logprobs.

There are three independent choices: importance weights, rejection, and the policy that the loss
measures its ratio from (`objective.py`). All arrays are (rows, max_seq_len) float32. d is current -
policy, the difference of the sampled tokens' logprobs, without a gradient and 0 outside `mask`.
Nothing here normalizes: a rejected token contributes 0 and still counts in the denominators of
`normalization.py`. docs/design/sampling-logprobs.md asks for a correction; the choices are those of
verl.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamrl.config.sections.learner import Correction
from streamrl.learner.loss import segments
from streamrl.learner.loss.losses import MAX_LOG_RATIO, k1, k2, k3


class TokenCorrection(NamedTuple):
    """What the correction does to each token."""

    weights: jax.Array  # The weight of its loss.
    untruncated: jax.Array  # The same before the limits apply.
    kept: jax.Array  # 1, or 0 if the token is rejected or masked and does not train at all.

    def where_kept(self, values: jax.Array) -> jax.Array:
        """The values of the tokens that train, and 0 elsewhere. Without this the gradient of what
        is rejected, be it infinite, would come back as 0 * inf.
        """
        return jnp.where(self.kept > 0, values, 0.0)


def correct(
    settings: Correction, d: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> TokenCorrection:
    """The importance weights and the rejections that the settings ask for."""
    whole = jnp.ones_like(d)
    weights = whole
    kept = acceptance_mask(settings, d, mask, segment_ids)
    chosen = settings.weights
    if chosen is not None:
        lowest, highest = chosen.limits
        whole = token_weights(d) if chosen.by == "token" else sequence_weights(d, segment_ids)
        if chosen.beyond == "truncate":
            weights = jnp.clip(whole, lowest, highest)
        else:
            inside = (whole >= lowest) & (whole <= highest)
            weights = jnp.where(inside, whole, 0.0)
            kept *= inside.astype(d.dtype)
    return TokenCorrection(weights, whole, kept * mask)


def token_weights(d: jax.Array) -> jax.Array:
    """exp(d) of each token. The variance is low, but the weight is biased over several tokens,
    because it ignores how likely the tokens before it were.
    """
    return jnp.exp(jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_weights(d: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """exp(sum of d over the rollout), repeated for each of its tokens. It is unbiased, and its
    variance grows with the length.
    """
    return token_weights(segments.segment_sum(d, segment_ids))


def acceptance_mask(
    settings: Correction, d: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """1 where a token is accepted, 0 where its distance, or that of its rollout, exceeds the limit.

    The distance is an estimator of KL(policy || current) at the token: |k1|, k2 or k3. By rollout,
    it is the mean over the rollout's tokens. `geometric` is always by rollout: it is the geometric
    mean of the ratio or of its inverse, whichever is larger.
    """
    chosen = settings.reject
    if chosen is None:
        return jnp.ones_like(d)
    if chosen.distance == "geometric":
        mean = segments.segment_mean(d, mask, segment_ids)
        return (jnp.abs(mean) <= jnp.log(chosen.above)).astype(d.dtype)
    distance = {"k1": k1, "k2": k2, "k3": k3}[chosen.distance](jnp.zeros_like(d), d)
    if chosen.by == "sequence":
        distance = segments.segment_mean(distance, mask, segment_ids)
    return (jnp.abs(distance) <= chosen.above).astype(d.dtype)


class WeightSums(NamedTuple):
    """Sums over weights w, one per token or (sequence weights) one per rollout. These scalars add
    up over the micro-batches of a batch.
    """

    number: jax.Array
    sum: jax.Array
    squares: jax.Array
    untruncated: jax.Array  # Sum of the weights before truncation and rejection.


def weight_sums(
    settings: Correction,
    d: jax.Array,
    corrected: TokenCorrection,
    mask: jax.Array,
    segment_ids: jax.Array,
) -> WeightSums:
    """The sums over the weights that the loss uses. Without any, they are over exp(d), which shows
    how much there would be to correct.
    """
    if settings.weights is None:
        used = token_weights(d)
        untruncated = used
    else:
        used = corrected.weights
        untruncated = corrected.untruncated
    weights = used * corrected.kept
    share = (
        mask / jnp.maximum(segments.segment_sum(mask, segment_ids), 1.0)
        if settings.weights and settings.weights.by == "sequence"
        else mask
    )
    return WeightSums(
        number=jnp.sum(share),
        sum=jnp.sum(share * weights),
        squares=jnp.sum(share * jnp.square(weights)),
        untruncated=jnp.sum(share * untruncated),
    )


def effective_sample_size(number: float, weights: float, squares: float) -> float:
    """(sum w)^2 / (n * sum w^2), as a share of n. It is 1 if all weights are equal and 1 / n if one
    sample has all the weight. Kish 1965.
    """
    return weights * weights / (number * squares) if squares > 0 else 0.0


def mean_weight(number: float, weights: float) -> float:
    """The mean weight, a factor of the whole gradient. The effective sample size does not show it,
    because it is the same for all weights times a constant.
    """
    return weights / number if number > 0 else 0.0
