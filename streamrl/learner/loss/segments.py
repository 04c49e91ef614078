"""Sums over the rollouts that share a row.

All arrays are (rows, max_seq_len). `segment_ids` int32 are 1, 2, ... from left to right, and 0
where padded (`examples.py`). Values must be 0 at tokens that do not count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_sum(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum of `values` over each rollout, repeated for each of its tokens: float32."""
    return jax.vmap(lambda row, ids: _sums(row, ids)[ids])(values, segment_ids)


def segment_mean(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The mean of `values` over the tokens of each rollout that are in `mask` float32, repeated for
    each of its tokens. It is 0 for a rollout without any.
    """
    return segment_sum(jnp.where(mask > 0, values, 0.0), segment_ids) / jnp.maximum(
        segment_sum(mask, segment_ids), 1.0
    )


def suffix_sum(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The sum of `values` from each token, inclusive, to the end of its rollout: float32."""

    def row(values: jax.Array, ids: jax.Array) -> jax.Array:
        sums = _sums(values, ids)
        gone = jnp.cumsum(values) - values  # before this token, in the whole row
        return jnp.where(ids > 0, jnp.cumsum(sums)[ids] - gone, 0.0)

    return jax.vmap(row)(values, segment_ids)


def _sums(row: jax.Array, ids: jax.Array) -> jax.Array:
    """The sum of each segment, by its id: (max_seq_len + 1,). A row cannot hold more rollouts than
    tokens.
    """
    return jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1)
