from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.run_file import with_overrides
from streamrl.stream.records import Reward, SessionEnd, SessionStart
from tests.extensions.gateway.conftest import BODY, Shared, post
from tests.support.gateways import ENV, gateways


def test_a_session_is_a_record_and_so_is_its_reward(tmp_path: Path):
    sessions = {"rewards": ["exact"], "reward_ranges": {"exact": [0, 1]}}
    with gateways(tmp_path, sessions=sessions) as gateway:
        url = gateway.start()
        opened = gateway.begin(url, group_id="g", metadata={"difficulty": 3})
        key = opened["grading_key"]
        answer = post(f"{url}/v1/chat/completions", opened["api_key"], json=BODY).json()
        said = post(f"{url}/rl/set_reward", key, json={"reward": 1, "interaction_id": answer["id"]})
        assert said.json() == {"session_id": "s0", "name": "exact", "reward": 1.0}
        post(f"{url}/rl/set_reward", key, json={"reward": 0.5}).raise_for_status()
        unknown = post(f"{url}/rl/set_reward", key, json={"reward": 1, "interaction_id": "x"})
        assert unknown.status_code == 400
        assert unknown.json()["error"]["param"] == "interaction_id"
        post(f"{url}/rl/end_session", key, json={}).raise_for_status()
        for wrong in (None, True, "1", [1], -0.1, 1.5, 1e300):
            refused = post(f"{url}/rl/set_reward", key, json={"reward": wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "reward"
        for field, value in (("name", "style"), ("scorer", "judge"), ("interaction", answer["id"])):
            refused = post(f"{url}/rl/set_reward", key, json={"reward": 1, field: value})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field
        assert "did you mean 'interaction_id'" in refused.json()["error"]["message"]
        refused = post(f"{url}/rl/end_session", key, json={"reward": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "reward"
        # the rollout is made: an equal request has been sent again, another comes too late
        assert post(f"{url}/rl/set_reward", key, json={"reward": 0.5}).status_code == 200
        assert post(f"{url}/rl/set_reward", key, json={"reward": 0.25}).status_code == 409
        start, _, first, second, _ = gateway.records()
    assert isinstance(start, SessionStart) and start.metadata == {"difficulty": 3}
    assert (start.environment, start.group_id, start.problem_id) == (ENV, "g", "7")
    assert isinstance(first, Reward) and isinstance(second, Reward)
    assert (first.rollout, first.value, first.call) == ("s0", 1.0, answer["choices"][0]["call"])
    assert (second.name, second.value, second.scorer) == ("exact", 0.5, "")


def test_the_sessions_that_a_server_has_left_fail(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        key = gateway.key()
        for name, server in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
            body = {"task_id": "7", "session_id": name, "metadata": {"server": server}}
            assert gateway.opened(url, body).status_code == 200
        left = {"server": "x", "failure": "it died"}
        assert post(f"{url}/rl/end_sessions", "other", json=left).status_code == 401
        assert post(f"{url}/rl/end_sessions", key, json={"server": ""}).status_code == 400
        ended = post(f"{url}/rl/end_sessions", key, json=left).json()
        again = post(f"{url}/rl/end_sessions", key, json=left).json()
        ends = [each for each in gateway.records() if isinstance(each, SessionEnd)]
    assert ended == {"env": ENV, "server": "x", "ended": ["a", "b"]} and again["ended"] == []
    assert {(end.session, end.failure) for end in ends} == {("a", "it died"), ("b", "it died")}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_id", ""),
        ("task_id", None),
        ("task_id", ["x"]),
        ("env", "nobody"),
        ("session_id", "a.b"),
        ("session_id", "a\nb"),
        ("session_id", 5),
        ("metadata", "x"),
        ("metadata", {"x": 10**30}),
        ("metadata", {"x": "y" * 300_000}),
        ("metadata", {"x": eval("[" * 40 + "]" * 40)}),
        ("group_id", "g" * 100_001),
        ("task_id", "t" * 100_001),
    ],
)
def test_a_session_that_cannot_be_is_refused_by_the_field(shared: Shared, field: str, value: Any):
    body = {"task_id": "1", field: value}
    refused = post(f"{shared.url}/rl/start_session", shared.opening_key, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field


def test_agents_are_told_the_address_of_the_proxy(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        settings = ["gateway.url=https://gateway.example/"]
        gateway.run = with_overrides(gateway.run, settings)
        begun = gateway.begin(gateway.start())
        assert begun["base_url"] == "https://gateway.example/v1"
        assert begun["anthropic_base_url"] == "https://gateway.example"
