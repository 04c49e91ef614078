"""A goal that is reached by rewards that are exactly that."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.batcher.curriculum import RewardTarget, target_reached
from streamrl.config.goals import reaches
from streamrl.config.sections.envs import PassRate
from streamrl.config.sections.serving import EvalEnv
from streamrl.envs.dataset_order import DatasetIndex
from streamrl.envs.difficulty_filter import to_visit
from streamrl.extensions.evaluator.suite import passes
from tests.support.build import rollout


@pytest.mark.parametrize("goal", [0.35, 0.45, 0.65, 0.7, 0.9, 0.95, -0.35, 1000.1])
def test_a_reward_that_is_the_goal_in_float32_reaches_it(goal: float):
    reward = float(np.float32(goal))
    assert reaches(reward, goal) and target_reached(
        RewardTarget("copy", goal, 2), {"copy": [reward] * 2}
    )
    assert not reaches(goal - 0.01, goal) and not target_reached(
        RewardTarget("copy", goal, 2), {"copy": [goal - 0.01] * 2}
    )


def test_passed_is_the_same_in_training_and_evaluation():
    """All parts of 0.7, 0.2 and 0.1 were earned."""
    earned = rollout(reward=0.7 + 0.2 + 0.1)
    assert earned.reward < 1.0 and passes(earned, EvalEnv())
    visit = to_visit(PassRate(), "copy", DatasetIndex(0, 0), [earned, rollout(reward=0.9)])
    assert visit is not None and (visit.passed, visit.rollouts) == (1, 2)
