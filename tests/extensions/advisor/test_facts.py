import pytest

from streamrl.extensions.advisor.facts import Engine, Step, with_learner_speed
from tests.support.advice import facts


def test_a_token_takes_longer_for_each_sequence_that_runs():
    assert Engine(9.0, 0.02, 0.001).step_s(10) == pytest.approx(0.03)


def test_a_learner_twice_as_fast_trains_in_half_the_time_and_publishes_in_the_same():
    steps = with_learner_speed(facts(steps=[Step(4.0, 1.0, 2.0)]), 2.0).steps
    assert steps == [Step(2.0, 1.0, 2.0)]
