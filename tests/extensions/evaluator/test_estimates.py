from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from streamrl.extensions.evaluator.estimates import (
    Interval,
    mean_of_problems,
    over_problems,
    pass_at_k,
    share,
)


@pytest.mark.parametrize(
    ("samples", "passed", "k", "value"),
    [
        (4, 0, 1, 0.0),
        (4, 4, 4, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (5, 2, 2, 0.7),
        (5, 2, 4, 1.0),
        (200, 1, 100, 0.5),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples: int, passed: int, k: int, value: float):
    assert pass_at_k(samples, passed, k) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("samples", "passed", "k"), [(6, 2, 3), (7, 3, 2), (5, 5, 1)])
def test_it_is_the_share_of_the_draws_of_k_that_have_a_right_one(samples: int, passed: int, k: int):
    draws = list(combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_it_is_unbiased():
    """The mean over all outcomes of 6 answers, each right with 0.3, is the chance that one
    of 2 is.
    """
    chances = [0.3**c * 0.7 ** (6 - c) * len(list(combinations(range(6), c))) for c in range(7)]
    assert sum(p * pass_at_k(6, c, 2) for c, p in enumerate(chances)) == pytest.approx(1 - 0.7**2)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0)])
def test_what_cannot_be_estimated_is_refused(samples: int, passed: int, k: int):
    with pytest.raises(ValueError, match="need 1 <= k <= samples"):
        pass_at_k(samples, passed, k)


def test_wilson_by_hand():
    """One answer a problem is a coin: 7 of 10 is Wilson's 0.397 to 0.892, 0 of 10 at most 0.278
    (statsmodels: proportion_confint, method wilson).
    """
    assert share(np.array([1.0] * 7 + [0.0] * 3)) == pytest.approx(
        (0.7, 0.39678, 0.89221), abs=1e-5
    )
    assert share(np.zeros(10)) == pytest.approx((0.0, 0.0, 0.27753), abs=1e-5)
    assert share(np.ones(10)) == pytest.approx((1.0, 0.72247, 1.0), abs=1e-5)


def test_answers_that_agree_less_than_coins_narrow_it_up_to_what_they_are():
    """Ten problems of 4 answers, 2 right each: 40 trials and no more, 20 of them right, are 0.352
    to 0.648.
    """
    found, problems = over_problems(np.full(10, 4), np.full(10, 2), 1)
    assert problems == 10 and found == pytest.approx((0.5, 0.35200, 0.64800), abs=1e-4)
    # a problem's answers all alike: ten trials
    alike, _ = over_problems(np.full(10, 4), np.array([4, 0] * 5), 1)
    assert alike == pytest.approx((0.5, 0.23659, 0.76341), abs=1e-4)


def test_problems_with_too_few_answers_are_left_out():
    found, problems = over_problems(np.array([4, 1, 0]), np.array([1, 1, 0]), 2)
    assert (found.value, problems) == (0.5, 1)
    assert over_problems(np.array([1, 0]), np.array([1, 0]), 2) == (Interval(0.0, 0.0, 1.0), 0)


@pytest.mark.parametrize(("k", "spread"), [(1, 0.5), (1, 20.0), (4, 2.0)])
def test_nineteen_of_twenty_intervals_hold_the_truth(k: int, spread: float):
    """Problems are right with a chance drawn from Beta(spread, spread): answers almost all alike,
    almost coins, and between.
    """
    rng = np.random.default_rng(0)
    right = 0
    truth = 1 - np.mean((1 - rng.beta(spread, spread, 400_000)) ** k)
    for _ in range(1000):
        passed = rng.binomial(8, rng.beta(spread, spread, 30))
        interval, _ = over_problems(np.full(30, 8), passed, k)
        right += interval.low <= truth <= interval.high
    assert 0.93 <= right / 1000 <= 0.999


def test_rewards_by_hand():
    """Means 1, 2 and 3, standard error sqrt(1 / 3)."""
    rewards = np.array([0.5, 1.5, 2, 3, 3, 3], np.float32)
    assert mean_of_problems(np.array([2, 1, 3, 0]), rewards) == pytest.approx(
        (2, 2 - 1.959964 / 3**0.5, 2 + 1.959964 / 3**0.5)
    )
    assert mean_of_problems(np.array([1]), np.array([0.25], np.float32)) == (0.25, 0.25, 0.25)
    assert mean_of_problems(np.array([0]), np.zeros(0, np.float32)) == (0, 0, 0)
