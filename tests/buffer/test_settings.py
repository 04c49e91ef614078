from __future__ import annotations

from streamrl.buffer.settings import buffer_config
from streamrl.config.run_file import parse, with_overrides
from tests.support.data_path import RUN


def test_shards_share_the_window():
    sharded = with_overrides(RUN, ["buffer.shards=2", "topics.partitions=2"])
    one = buffer_config(sharded, 1)
    assert (one.shard, one.shards, one.partitions) == (1, 2, 2)
    assert one.max_window_tokens == RUN.buffer.max_window_tokens // 2


def test_only_envs_with_rules_of_their_own_have_some():
    assert buffer_config(RUN, 0).own == {}
    config = buffer_config(with_overrides(RUN, ["envs.add.buffer={group_size: 4}"]), 0)
    assert list(config.own) == ["add"]
    assert (config.for_env("add").group_size, config.for_env("copy").group_size) == (4, 2)
    assert config.for_env("add").max_age == RUN.buffer.max_age


def test_a_fork_begins_at_its_version():
    assert buffer_config(RUN, 0).begins_at == -1
    fork = with_overrides(RUN, ["fork={run: p, version: 3, sha256: ab}"])
    assert buffer_config(fork, 0).begins_at == 3


def test_a_group_of_sessions_waits_for_both_limits_of_a_session():
    envs = {
        "agents": {"sessions": {"idle_s": 100, "reward_wait_s": 50}},
        "copy": {},
    }
    config = buffer_config(parse({"run": "r", "envs": envs}), 0)
    assert config.for_env("agents").session_wait_s == 150
    assert config.for_env("copy").session_wait_s == 0
