import numpy as np
import pytest

from streamrl.buffer.advantages import advantage_named, grpo, rloo
from streamrl.errors import ConfigError
from tests.build import floats


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


def test_results_are_float32():
    assert rloo(floats(1, 0)).dtype == grpo(floats(1, 0)).dtype == np.float32


def test_own_function_by_import_path():
    assert advantage_named("streamrl.buffer.advantages:grpo") is grpo


@pytest.mark.parametrize(
    ("name", "says"),
    [("rlo", "did you mean 'rloo'"), ("nowhere.at.all:f", "cannot be imported"), ("streamrl.buffer.advantages:nope", "has no 'nope'")],
)
def test_a_wrong_name_is_explained(name: str, says: str):
    with pytest.raises(ConfigError, match=says):
        advantage_named(name)
