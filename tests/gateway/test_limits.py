"""SessionKeys, rewards, limits, and whatever else may come over HTTP."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.config import topology
from streamrl.errors import BrokerUnreachable, ConfigError
from streamrl.gateway import process
from streamrl.gateway.keys import SessionKeys, local_secret
from streamrl.records import Reward, SessionStart
from tests.gateway.conftest import Shared
from tests.support.gateways import ENV, gateways, run_of
from tests.support.waiting import patience

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
BODY = {"messages": [{"role": "user", "content": "q"}], "input": "q", "token_ids": [1, 2]}


def post(url: str, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}" if key else "none", **fields.pop("headers", {})}
    return httpx.post(url, headers=headers, timeout=patience(30), **fields)


# ---- keys ----------------------------------------------------------------------------------------


def test_a_key_opens_its_session_only():
    keys = SessionKeys(b"secret")
    assert keys.session_of(keys.key_of("a-b", "s_1")) == ("a-b", "s_1")
    signature = keys.key_of("a", "s").rpartition(".")[2]
    wrong = [
        "",
        "sk-",
        f"sk-a.t.{signature}",
        f"sk-b.s.{signature}",
        f"a.s.{signature}",
        "sk-ä.ö.ü",
    ]
    wrong += [keys.key_of("a", "s")[:-1], SessionKeys(b"other").key_of("a", "s")]
    assert [keys.session_of(key) for key in wrong] == [None] * len(wrong)
    assert SessionKeys(b"s", "gw").opens_gateway("gw") and not SessionKeys(
        b"s", "gw"
    ).opens_gateway("ä")


def test_the_secret_of_a_run_is_the_same_for_all_who_begin_at_once(tmp_path: Path):
    found = list[bytes]()
    directory = tmp_path / "run"
    threads = [
        threading.Thread(target=lambda: found.append(local_secret(directory))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 64
    (file,) = directory.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_key_is_401_in_the_shape_of_the_api(shared: Shared, path: str):
    for key in ("", "sk-agent.s0.wrong", shared.key + "x", shared.key.replace("s0", "s1")):
        refused = post(shared.url + path, key, json=BODY)
        assert refused.status_code == 401
        kind = refused.json()["error"]["type"]
        assert kind == "authentication_error"
        assert ("type" in refused.json()) == (path == "/v1/messages")


def test_the_gateways_key_opens_sessions_and_a_sessions_key_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GW_KEY", "gw-secret")
    with gateways(tmp_path, api_key="env:GW_KEY") as gateway:
        gateway_url = gateway.start()
        url = gateway_url + "/rl/start_session"
        opened = gateway.opened(gateway_url, {"task_id": 7}, "gw-secret")
        assert opened.status_code == 200
        assert [
            post(url, key, json={"task_id": 7}).status_code
            for key in ("", "x", opened.json()["api_key"])
        ] == [401] * 3
        assert not (gateway.run.directory / "gateway.key").exists()


# ---- sessions ------------------------------------------------------------------------------------


def test_a_session_is_a_record_and_so_is_its_reward(tmp_path: Path):
    with gateways(tmp_path, sessions={"rewards": ["exact"]}) as gateway:
        url = gateway.start()
        opened = gateway.begin(url, group_id="g", metadata={"difficulty": 3})
        key = opened["api_key"]
        answer = post(f"{url}/v1/chat/completions", key, json=BODY).json()
        said = post(f"{url}/rl/set_reward", key, json={"reward": 1, "interaction_id": answer["id"]})
        assert said.json() == {"session_id": "s0", "name": "exact", "reward": 1.0}
        post(f"{url}/rl/end_session", key, json={}).raise_for_status()
        more = {"reward": 0.5, "name": "style", "scorer": "judge", "scorer_version": "2"}
        post(f"{url}/rl/set_reward", key, json=more).raise_for_status()
        for wrong in (None, True, "1", [1]):
            refused = post(f"{url}/rl/set_reward", key, json={"reward": wrong})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "reward"
        start = gateway.records()[0]
        first, second = gateway.records(topology.rewards(ENV))
    assert isinstance(start, SessionStart) and start.metadata == {"difficulty": 3}
    assert (start.environment, start.group_id, start.problem_id) == (ENV, "g", "7")
    assert isinstance(first, Reward) and isinstance(second, Reward)
    assert (first.rollout, first.value, first.call) == ("s0", 1.0, answer["choices"][0]["call"])
    assert (second.name, second.scorer, second.scorer_version) == ("style", "judge", "2")


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
        ("metadata", {"x": "y" * 300_000}),
        ("metadata", {"x": eval("[" * 40 + "]" * 40)}),
        ("group_id", "g" * 2_000),
    ],
)
def test_a_session_that_cannot_be_is_refused_by_the_field(shared: Shared, field: str, value: Any):
    refused = post(f"{shared.url}/rl/start_session", json={"task_id": "1", field: value})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field


# ---- limits --------------------------------------------------------------------------------------


def test_open_sessions_calls_and_the_size_of_a_body_have_limits(tmp_path: Path):
    settings: dict[str, Any] = {"max_calls": 2, "max_body_mb": 0.01}
    with gateways(tmp_path, sessions={"max_open": 1}, **settings) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["api_key"]
        start = f"{url}/rl/start_session"
        refused = post(start, json={"task_id": "1"})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        assert "max_open" in refused.text
        chat = f"{url}/v1/chat/completions"
        large = [{"role": "user", "content": "x" * 20_000}]
        for path in PATHS:
            refused = post(url + path, key, json={"messages": large})
            assert refused.status_code == 413 and "gateway.max_body_mb" in refused.text
        many = post(chat, key, json={**BODY, "n": 3})
        assert many.status_code == 400 and many.json()["error"]["code"] == "max_calls"
        assert post(chat, key, json={**BODY, "n": 2}).status_code == 200
        assert post(chat, key, json=BODY).status_code == 400
        post(f"{url}/rl/end_session", key, json={}).raise_for_status()
        assert post(start, json={"task_id": "1"}).status_code == 200


def test_a_prompt_that_fills_the_context_is_the_agents_error(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["api_key"]
        gateway.stub.mode = "refuse"
        refused = post(f"{url}/v1/chat/completions", key, json=BODY)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_without_a_log_a_call_waits_and_then_may_be_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with gateways(tmp_path) as gateway:
        env = gateway.run.envs[ENV].model_copy(update={"timeout_s": 1.0})
        gateway.run.envs[ENV] = env
        url = gateway.start()
        key = gateway.begin(url)["api_key"]

        def gone(*_: object) -> Any:
            raise BrokerUnreachable("nobody answers")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.log, "end_offsets", gone)
            refused = post(f"{url}/v1/messages", key, json=BODY)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert post(f"{url}/v1/messages", key, json=BODY).status_code == 200


@pytest.mark.parametrize("path", (*PATHS, "/rl/set_reward", "/rl/end_session"))
@pytest.mark.parametrize(
    "content",
    [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'"x"', b"null", b"1e999"],
)
def test_a_body_that_is_no_request_is_400(shared: Shared, path: str, content: bytes):
    headers = {"content-type": "application/json"}
    refused = post(shared.url + path, shared.key, content=content, headers=headers)
    assert refused.status_code == 400 and refused.json()["error"]["message"]


def test_only_json_and_only_names_of_this_machine(shared: Shared):
    url = f"{shared.url}/rl/start_session"
    plain = post(url, content=b'{"task_id": "1"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    assert "task_id" in post(url).text  # nothing was sent
    assert post(url, json={"task_id": "1"}, headers={"host": "evil.example"}).status_code == 400
    assert httpx.get(f"{shared.url}/health").json() == {"status": "ok"}
    models = httpx.get(f"{shared.url}/v1/models", headers={"x-api-key": shared.key})
    assert [model["id"] for model in models.json()["data"]] == ["policy"]
    assert httpx.get(f"{shared.url}/v1/models").status_code == 401


def test_a_key_of_a_session_that_never_began_is_404(shared: Shared):
    key = SessionKeys(local_secret(shared.gateway.run.directory)).key_of(ENV, "nobody")
    assert post(f"{shared.url}/v1/responses", key, json=BODY).status_code == 404
    assert post(f"{shared.url}/rl/end_session", key, json={}).status_code == 404


def test_a_run_without_sessions_has_no_gateway(tmp_path: Path):
    run = run_of(tmp_path)
    none = run.envs[ENV].model_copy(update={"sessions": None})
    with pytest.raises(ConfigError, match=r"envs\.<name>\.sessions"):
        process.check(run.model_copy(update={"envs": {ENV: none}}))
    other = run.envs[ENV].model_copy(update={"tool_syntax": "my:own"})
    with pytest.raises(ConfigError, match="tool_syntax is 'my:own'"):
        process.check(run.model_copy(update={"envs": {ENV: other}}))
