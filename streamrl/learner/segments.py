"""Sums over the rollouts that share a row, given back to each of their tokens.

All arrays are (rows, max_seq_len). `segment_ids` int32 are those of `batcher/packing.py`: 1, 2, ...
from left to right, 0 where padded. What is added must be 0 at tokens that do not count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_sum(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Each token's rollout's sum of `values`: float32."""
    return jax.vmap(lambda row, ids: _sums(row, ids)[ids])(values, segment_ids)


def segment_mean(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Each token's rollout's mean of `values` over `mask` float32; 0 for a rollout without any."""
    return segment_sum(jnp.where(mask > 0, values, 0.0), segment_ids) / jnp.maximum(
        segment_sum(mask, segment_ids), 1.0
    )


def suffix_sum(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum of `values` from each token to the end of its rollout, its own included: float32."""

    def row(values: jax.Array, ids: jax.Array) -> jax.Array:
        sums = _sums(values, ids)
        gone = jnp.cumsum(values) - values  # before this token, in the whole row
        return jnp.where(ids > 0, jnp.cumsum(sums)[ids] - gone, 0.0)

    return jax.vmap(row)(values, segment_ids)


def _sums(row: jax.Array, ids: jax.Array) -> jax.Array:
    """(max_seq_len + 1,) by id: a row cannot hold more rollouts than tokens."""
    return jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)
