import pytest

from streamrl.extensions.recordings.new_rewards import (
    ScorerVersion,
    parse_scorers,
    read_rewards,
    with_new_rewards,
)
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward
from streamrl.system.errors import ConfigError
from tests.extensions.recordings.test_retraining_fork import (
    STYLE,
    WEIGHTED,
    judge,
    right,
    style,
    wander,
)
from tests.support.build import rollout
from tests.support.data_path import RUN, publish


def test_a_rollout_without_the_reward_and_a_scorer_that_judged_nothing_are_refused():
    log = wander(5, WEIGHTED, "exact", right)
    with pytest.raises(ConfigError, match="no rollout has a reward of that scorer"):
        read_rewards(log, RUN.envs, [STYLE])
    judge(log, style)
    more = rollout("copy", "late", 0, 0)
    publish(log, Output("rollouts.copy", more.group_id, more))
    with pytest.raises(ConfigError, match="1 rollouts of env copy have no reward of it"):
        read_rewards(log, RUN.envs, [STYLE])
    for text in ("style", "@2", "style@", "style@2,"):
        with pytest.raises(ConfigError, match="give NAME@VERSION"):
            parse_scorers(text)
    assert parse_scorers("style@2, right@a@b") == [STYLE, ScorerVersion("right", "a@b")]


def test_two_scorers_may_not_give_the_same_name():
    rewards = [Reward(rollout="g0-0", name="style", value=value) for value in (0.0, 1.0)]
    with pytest.raises(ConfigError, match="two scorers give 'style'"):
        with_new_rewards(rollout(), rewards, {})
