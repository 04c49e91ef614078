from itertools import product

import numpy as np
import pytest

from streamrl.buffer.advantages import (
    ROUNDING,
    advantage_named,
    check_advantages,
    dr_grpo,
    grpo,
    has_nonzero_advantage,
    maxrl,
    reinforce_plus_plus,
    rloo,
)
from streamrl.config import choices
from streamrl.system.errors import ConfigError
from tests.support.build import floats


def test_rloo_is_the_reward_less_the_mean_of_the_others():
    # 1 - (0 + 0.5)/2 = 0.75; 0 - (1 + 0.5)/2 = -0.75; 0.5 - (1 + 0)/2 = 0
    np.testing.assert_allclose(rloo(floats(1, 0, 0.5)), [0.75, -0.75, 0.0], atol=1e-7)


def test_rloo_of_a_single_reward_is_zero():
    assert rloo(floats(3)).tolist() == [0.0]


def test_rloo_of_equal_rewards_is_zero():
    np.testing.assert_allclose(rloo(floats(*[0.1] * 8)), 0, atol=1e-7)


def test_grpo_is_in_units_of_the_standard_deviation():
    # mean 0.5, population std 0.5
    np.testing.assert_allclose(grpo(floats(1, 0)), [1, -1], atol=1e-3)
    assert grpo(floats(0.3, 0.3)).tolist() == [0.0, 0.0]
    # population std 0.0003, and the epsilon is a third of that
    np.testing.assert_allclose(grpo(floats(0.0006, 0)), [0.75, -0.75], rtol=1e-5)


def test_dr_grpo_leaves_the_scale_alone():
    np.testing.assert_allclose(dr_grpo(floats(1, 0, 0, 0)), [0.75, -0.25, -0.25, -0.25])
    # grpo makes them 1 and -1
    np.testing.assert_allclose(dr_grpo(floats(0.1, 0)), [0.05, -0.05], rtol=1e-6)


def test_reinforce_plus_plus_leaves_the_reward_to_the_batch():
    assert reinforce_plus_plus(floats(1, 0.5, -2)).tolist() == [1, 0.5, -2]


def test_maxrl_is_in_units_of_the_mean():
    # solved once in four tries, mean 1/4; twice, mean 1/2; the rarer success counts for more
    np.testing.assert_allclose(maxrl(floats(1, 0, 0, 0)), [3, -1, -1, -1])
    np.testing.assert_allclose(maxrl(floats(1, 1, 0, 0)), [1, 1, -1, -1])
    assert (
        maxrl(floats(0, 0)).tolist()
        == maxrl(floats(-1, 1)).tolist()
        == maxrl(floats(2, 2)).tolist()
        == [0, 0]
    )


@pytest.mark.parametrize("tries", [2, 3, 4])
def test_maxrl_follows_the_gradient_of_the_log_likelihood(tries: int):
    """All outcomes of a group, with P(solved) = p: the mean of A * d log P / dp is the first terms
    of d log p / dp = 1 + (1 - p) + (1 - p)^2 + ...
    """
    p = 0.3
    gradient = 0.0
    for solved in product((0, 1), repeat=tries):
        chance = p ** sum(solved) * (1 - p) ** (tries - sum(solved))
        score = [1 / p if one else -1 / (1 - p) for one in solved]
        gradient += chance * float(maxrl(floats(*solved)) @ score) / tries
    assert gradient == pytest.approx(sum((1 - p) ** k for k in range(tries - 1)), rel=1e-6)


def test_equal_rewards_carry_no_information():
    for name in choices.ADVANTAGES:
        advantage = advantage_named(name)
        assert has_nonzero_advantage(advantage(floats(1, 0, 1)))
        assert has_nonzero_advantage(advantage(floats(*[0.1] * 8))) is (name == "reinforce++")


def test_an_advantage_of_the_size_of_rounding_carries_no_information():
    assert not has_nonzero_advantage(np.array([ROUNDING, -ROUNDING]))
    assert has_nonzero_advantage(np.array([0, -1.001 * ROUNDING]))


@pytest.mark.parametrize("name", choices.ADVANTAGES)
def test_results_are_float32_of_any_size(name: str):
    for size in range(4):
        advantages = advantage_named(name)(floats(*range(size)))
        assert (advantages.dtype, advantages.shape) == (np.float32, (size,))
        assert np.isfinite(advantages).all()


@pytest.mark.parametrize("name", choices.ADVANTAGES)
def test_the_run_files_checks_know_which_advantages_need_peers(name: str):
    """`buffer.min_group_size: 1` is refused for these, because a single rollout teaches nothing."""
    single = advantage_named(name)(floats(3))
    assert choices.ADVANTAGES[name].relative is not has_nonzero_advantage(single), (
        f"{name} of a single rollout is {single.tolist()}: correct `relative` of its line in"
        " streamrl/config/choices.py"
    )


def test_own_function_by_import_path():
    assert advantage_named("streamrl.buffer.advantages:grpo") is grpo


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("rlo", "did you mean 'rloo'"),
        ("nowhere.at.all:f", "cannot be imported"),
        ("streamrl.buffer.advantages:nope", "has no 'nope'"),
    ],
)
def test_a_wrong_name_is_explained(name: str, says: str):
    with pytest.raises(ConfigError, match=says):
        advantage_named(name)


def test_maxrl_of_a_mean_that_is_rounding_is_nothing():
    """0.3 - 0.1 - 0.2 is 7e-18 in float64 of float32: a quotient of rounding, not of the problem's
    difficulty.
    """
    for rewards in ([0.3, -0.1, -0.2], [1e18, -1e18, 1e-21], [1e6, -1e6, 0.01]):
        assert maxrl(np.array(rewards, np.float32)).tolist() == [0.0] * 3
    np.testing.assert_allclose(
        maxrl(np.array([1e-9, 0.0, 0.0], np.float32)), [2, -1, -1], rtol=1e-5
    )


def test_an_advantage_function_that_returns_nonsense_is_named():
    with pytest.raises(ValueError, match=r"^group g7: .*expected 2 finite"):
        check_advantages(floats(1, np.nan), 2, "g7")
    with pytest.raises(ValueError, match=r"^the advantage function .*expected 3 finite"):
        check_advantages(floats(1, 2), 3)
