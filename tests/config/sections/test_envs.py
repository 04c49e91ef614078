from __future__ import annotations

from streamrl.config.sections.envs import Env, Sessions


def test_an_env_in_a_python_of_its_own_has_sessions():
    assert Env.model_validate({"python": "there/bin/python"}).sessions == Sessions()
    chosen = {"python": "there/bin/python", "sessions": {"max_open": 3}}
    assert Env.model_validate(chosen).sessions == Sessions(max_open=3)
    assert Env().sessions is None


def test_rollouts_of_sessions_are_not_published_by_the_replicas():
    assert Env(replicas=2).producers == 2
    assert Env(replicas=2, sessions=Sessions()).producers == 0
