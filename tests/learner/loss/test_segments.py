from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from streamrl.learner.loss import segments

# Two rollouts and padding; six of one token. Of numpy: JAX would start threads when this is
# imported, and tests.mutants forks.
IDS: Any = np.array([[1, 1, 2, 2, 2, 0], [1, 2, 3, 4, 5, 6]], np.int32)
VALUES: Any = np.array([[1, 2, 4, 8, 16, 0], [1, 2, 3, 4, 5, 6]], np.float32)


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
