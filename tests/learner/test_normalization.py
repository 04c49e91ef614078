"""Two rows: rollouts of one and of three sampled tokens share the first, one of two lies in the
second. 6 tokens, 3 rollouts, rows of 8.
"""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.learner.normalization import (
    AVERAGES,
    constant_length,
    rollout_mean,
    segment_numbers,
    token_mean,
)

SEGMENTS = np.array([[1, 1, 2, 2, 2, 2, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]], np.int32)
ROLLOUTS = segment_numbers(SEGMENTS)
MASK = np.array([[1, 0, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]], np.float32)


def test_every_token_counts_the_same():
    np.testing.assert_allclose(token_mean(MASK, ROLLOUTS), MASK / 6)


def test_every_sample_counts_the_same():
    expected = [[1 / 3, 0, 1 / 9, 1 / 9, 1 / 9, 0, 0, 0], [1 / 6, 1 / 6, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(rollout_mean(MASK, ROLLOUTS), expected, rtol=1e-6)


def test_a_constant_length_is_that_of_a_row():
    np.testing.assert_allclose(constant_length(MASK, ROLLOUTS), MASK / (3 * 8))


def test_a_rollout_without_a_sampled_token_is_no_sample():
    mask = MASK * [[0], [1]]
    np.testing.assert_allclose(rollout_mean(mask, ROLLOUTS), mask / 2)


@pytest.mark.parametrize("name", AVERAGES)
def test_nothing_to_train_on_counts_nothing(name: str):
    weights = AVERAGES[name](np.zeros_like(MASK), ROLLOUTS)
    assert weights.dtype == np.float32 and not weights.any()


def test_a_rollout_that_forked_is_one_rollout():
    """The one of three tokens in the first row and the one in the second are two sequences of
    rollout 2, which has five sampled tokens.
    """
    rollouts = np.array([[1, 1, 2, 2, 2, 2, 0, 0], [2, 2, 2, 0, 0, 0, 0, 0]])
    expected = [[1 / 2, 0, 1 / 10, 1 / 10, 1 / 10, 0, 0, 0], [1 / 10, 1 / 10, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(rollout_mean(MASK, rollouts), expected, rtol=1e-6)
    np.testing.assert_allclose(constant_length(MASK, rollouts), MASK / (2 * 8))
    np.testing.assert_allclose(token_mean(MASK, rollouts), MASK / 6)
