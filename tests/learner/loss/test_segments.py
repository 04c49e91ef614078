from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from streamrl.learner.loss import segments

# two rollouts and padding; six of one token
IDS = jnp.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 4, 5, 6]], jnp.int32)
VALUES = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])


def test_each_token_is_given_its_rollouts_sum():
    np.testing.assert_allclose(
        segments.segment_sum(VALUES, IDS), [[3, 3, 28, 28, 28, 0], [1, 2, 3, 4, 5, 6]]
    )


def test_the_mean_is_over_the_mask():
    mask = jnp.array([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [0.0] * 6])
    np.testing.assert_allclose(
        segments.segment_mean(VALUES, mask, IDS), [[2, 2, 10, 10, 10, 0], [0] * 6]
    )


def test_still_to_come_counts_from_the_token_to_its_rollouts_end():
    np.testing.assert_allclose(
        segments.suffix_sum(VALUES, IDS), [[3, 2, 28, 24, 16, 0], [1, 2, 3, 4, 5, 6]]
    )
