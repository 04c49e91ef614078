from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.run_file import parse
from streamrl.config.sections.envs import AgentEnv, Env, ServerEnv, Sessions


@pytest.mark.parametrize(
    ("settings", "kind", "producers"),
    [
        ({}, Env, 1),
        ({"replicas": 0}, Env, 0),
        ({"sessions": {}}, AgentEnv, 0),
        ({"kind": "verifiers:gsm8k", "python": "there/bin/python", "replicas": 2}, ServerEnv, 0),
    ],
)
def test_an_env_is_of_the_kind_that_its_keys_choose(
    settings: dict[str, Any], kind: type, producers: int
):
    run = parse({"run": "r", "envs": {"copy-digits": settings}})
    env = run.envs["copy-digits"]
    assert type(env) is kind
    assert env.producers == producers
    assert parse(run.model_dump(mode="json")) == run


def test_an_env_with_servers_has_sessions():
    env = ServerEnv(python="there/bin/python")
    assert env.sessions == Sessions()
    chosen = {"python": "there/bin/python", "sessions": {"max_open": 3}}
    assert ServerEnv.model_validate(chosen).sessions == Sessions(max_open=3)
    assert Env().sessions is None


def test_a_reward_without_a_range_is_within_a_million():
    sessions = Sessions(reward_ranges={"judge": (0, 1)})
    assert sessions.reward_range("judge") == (0, 1)
    assert sessions.reward_range("other") == (-1e6, 1e6)
