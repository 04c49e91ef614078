"""What each key may do at a gateway: an agent's samples, and does nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.config import topology
from streamrl.envs.sessions.keys import Key, RunKeys, keys_of, local_secret
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward, SessionEnd
from tests.extensions.gateway.conftest import BODIES, BODY, PATHS, Shared, post
from tests.support.gateways import ENV, gateways

OPENING = ("/rl/start_session", "/rl/end_sessions")
GRADING = ("/rl/set_reward", "/rl/end_session")
OTHER_BODIES = {
    "/rl/start_session": {"task_id": "7"},
    "/rl/end_sessions": {"server": "x", "failure": "f"},
    "/rl/set_reward": {"reward": 1.0},
    "/rl/end_session": {"failure": "f"},
}


def test_each_right_opens_its_own_paths_and_no_others(shared: Shared):
    paths = {"open": OPENING, "sample": PATHS, "grade": GRADING}  # which ends the session
    begun = shared.gateway.begin(shared.url, "rights")
    keys = {
        "open": shared.opening_key,
        "grade": begun["grading_key"],
        "sample": begun["api_key"],
    }
    for right, own in paths.items():
        for path in (*OPENING, *PATHS, *GRADING):
            body = {**BODIES, **OTHER_BODIES}[path]
            status = post(shared.url + path, keys[right], json=body).status_code
            assert status == (200 if path in own else 403), (right, path)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_key_is_401_in_the_shape_of_the_api(shared: Shared, path: str):
    other_run = RunKeys(local_secret(shared.gateway.run.directory), "other")
    other_env = Key("sample", "another", "s0")
    wrong = [
        "",
        "sk-agent.s0.wrong",
        shared.key + "x",
        shared.key.replace("s0", "s1"),
        other_run.make(Key("sample", ENV, "s0"), 0.0, 1e10),
        keys_of(shared.gateway.run).make(Key("sample", ENV, "s0"), 0.0, 1.0),  # expired
        keys_of(shared.gateway.run).make(other_env, 0.0, 1e10),
        local_secret(shared.gateway.run.directory).decode(),
    ]
    for key in wrong:
        refused = post(shared.url + path, key, json=BODY)
        assert refused.status_code == 401, key
        assert refused.json()["error"]["type"] == "authentication_error"
        assert ("type" in refused.json()) == (path == "/v1/messages")


def test_a_refusal_gives_the_way_to_the_right_key(shared: Shared):
    refused = post(f"{shared.url}/rl/set_reward", shared.key, json={"reward": 1})
    assert "give the grading_key that /rl/start_session returned" in refused.text
    refused = post(f"{shared.url}/rl/start_session", "", json={"task_id": "1"})
    assert "streamrl gateway-key" in refused.text


def test_a_key_opens_sessions_of_its_env_only(shared: Shared):
    for path in OPENING:
        body = {**OTHER_BODIES[path], "env": "another"}
        refused = post(shared.url + path, shared.opening_key, json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "env"


def test_a_key_of_an_env_samples_in_the_sessions_that_calls_name(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        for session in ("s0", "s1"):
            gateway.begin(url, session)

        def asked(named: object) -> httpx.Response:
            metadata = {"mine": "stays", "streamrl_session": named}
            body = {"input": "q", "metadata": metadata}
            answer = post(f"{url}/v1/responses", gateway.key("sample"), json=body)
            if answer.status_code == 200:
                assert answer.json()["metadata"] == metadata
            return answer

        statuses = [asked(f"{ENV}.{session}").status_code for session in ("s0", "s1", "s1")]
        assert statuses == [200] * 3
        assert asked(f"{ENV}.s2").status_code == 404
        for named in ("s0", "other.s0", f"{ENV}.", 5, None):
            assert asked(named).status_code == 403
        assert [call.session for call in gateway.calls()].count("s1") == 2


def test_a_grading_key_is_refused_once_no_reward_counts_any_more(tmp_path: Path):
    """The assembler has written the last end of the session."""
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["grading_key"]
        producer = gateway.log.producer()
        end = SessionEnd(session="s0", is_last=True)
        producer.send(to_message(Output(topology.turns(ENV), "s0", end)))
        assert post(f"{url}/rl/end_session", key, json={}).status_code == 200
        refused = post(f"{url}/rl/set_reward", key, json={"reward": 1})
        assert refused.status_code == 409 and "waits for no reward any more" in refused.text
        records = gateway.records(topology.turns(ENV))
    assert not any(isinstance(record, Reward) for record in records)


def test_the_run_file_names_the_address_that_agents_are_given(tmp_path: Path):
    settings: dict[str, Any] = {"url": "https://gateway.example/rl/"}
    with gateways(tmp_path, **settings) as gateway:
        begun = gateway.begin(gateway.start())
    assert begun["base_url"] == "https://gateway.example/rl/v1"
    assert begun["anthropic_base_url"] == "https://gateway.example/rl"
