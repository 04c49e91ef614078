from __future__ import annotations

import pytest

from streamrl.batcher.curriculum import CurriculumState
from streamrl.batcher.settings import batcher_config, curriculum_rules, first_state
from streamrl.batcher.state import BatcherState
from streamrl.config.run_file import with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.system.errors import ConfigError
from tests.support.data_path import RUN


def test_producers_are_granted_groups_where_admission_is_by_capacity():
    assert batcher_config(RUN).producers == {}
    config = batcher_config(
        with_overrides(
            RUN,
            [
                "batcher.admission=capacity",
                "buffer.group_size=3",
                "envs.copy.replicas=2",
                "envs.add.replicas=0",
            ],
        )
    )
    assert config.producers == {"copy": ["copy-0", "copy-1"]}
    env = RUN.envs["copy"]
    assert config.group_tokens["copy"] == 3 * 2 * env.max_tokens
    assert config.group_limits_s == {"copy": env.rollout_timeout_s + 2 * env.env_timeout_s}


def test_a_batch_is_normalized_as_the_advantage_of_the_groups_needs():
    assert batcher_config(RUN).advantage == "none"
    assert (
        batcher_config(with_overrides(RUN, ["buffer.advantage=reinforce++"])).advantage
        == "normalize"
    )
    both = ["buffer.advantage=reinforce++", "batcher.advantage=none"]
    assert batcher_config(with_overrides(RUN, both)).advantage == "none"


def test_an_env_without_policy_gradient_has_no_say_in_the_normalization():
    cross_entropy = ["envs.copy.loss.policy_gradient=0", "envs.copy.loss.cross_entropy=1"]
    other = "envs.add.buffer.advantage=reinforce++"
    assert batcher_config(with_overrides(RUN, [*cross_entropy, other])).advantage == "normalize"


def test_only_envs_with_a_limit_of_their_own_have_one():
    config = batcher_config(with_overrides(RUN, ["envs.add.buffer={max_age: 1}"]))
    assert config.max_ages == {"add": 1}
    assert (config.max_age_of("add"), config.max_age_of("copy")) == (1, 2)


def test_a_balance_that_nobody_ships_is_refused():
    with pytest.raises(ConfigError, match="batcher.balance: 'weight' is not known"):
        batcher_config(with_overrides(RUN, ["batcher.balance=weight"]))


def test_the_curriculum_knows_the_envs():
    assert curriculum_rules(RUN).envs == ("copy", "add")


def test_a_fork_goes_on_with_the_number_the_debts_and_the_stage_of_its_version():
    assert first_state(None) == BatcherState()
    fork = Fork(run="p", version=3, sha256="ab", balance={"copy": 7.0}, stage=1, rewards={"a": [1]})
    assert first_state(fork) == BatcherState(
        next_batch=3, deficit={"copy": 7.0}, progress=CurriculumState(1, {"a": [1.0]})
    )
