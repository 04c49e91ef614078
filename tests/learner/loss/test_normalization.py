"""Two rows: rollouts of one and of three sampled tokens share the first, one of two lies in the
second. 6 tokens, 3 rollouts, rows of 8.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from streamrl.config.sections.learner import Learner
from streamrl.learner.loss.normalization import (
    average_named,
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


@pytest.mark.parametrize("row_length", [8, 16, 32])
def test_the_constant_is_the_given_length_whatever_the_length_of_the_rows(row_length: int):
    """The same three rollouts in longer rows have the same weights: 1 / (3 * 32) for a token."""
    padding = ((0, 0), (0, row_length - 8))
    mask = np.pad(MASK, padding)
    rollouts = segment_numbers(np.pad(SEGMENTS, padding))
    weights = constant_length(mask, rollouts, length=32)
    np.testing.assert_allclose(weights[:, :8], MASK / (3 * 32))
    assert not weights[:, 8:].any()


def test_a_rollout_without_a_sampled_token_is_no_sample():
    mask = MASK * [[0], [1]]
    np.testing.assert_allclose(rollout_mean(mask, ROLLOUTS), mask / 2)
    np.testing.assert_allclose(constant_length(mask, ROLLOUTS, 8), mask / 8)


@pytest.mark.parametrize("name", get_args(Learner.model_fields["average"].annotation)[1:])
def test_nothing_to_train_on_counts_nothing(name: str):
    weights = average_named(name, 8)(np.zeros_like(MASK), ROLLOUTS)
    assert weights.dtype == np.float32 and not weights.any()


def test_a_rollout_that_forked_is_one_rollout():
    """The one of three tokens in the first row and the one in the second are two sequences of
    rollout 2, which has five sampled tokens.
    """
    rollouts = np.array([[1, 1, 2, 2, 2, 2, 0, 0], [2, 2, 2, 0, 0, 0, 0, 0]])
    expected = [[1 / 2, 0, 1 / 10, 1 / 10, 1 / 10, 0, 0, 0], [1 / 10, 1 / 10, 0, 0, 0, 0, 0, 0]]
    np.testing.assert_allclose(rollout_mean(MASK, rollouts), expected, rtol=1e-6)
    np.testing.assert_allclose(constant_length(MASK, rollouts, 8), MASK / (2 * 8))
    np.testing.assert_allclose(token_mean(MASK, rollouts), MASK / 6)
