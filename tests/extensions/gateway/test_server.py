"""Limits, and whatever else may come over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from streamrl.extensions.gateway import bodies, calls
from streamrl.system.errors import BrokerUnreachable
from tests.extensions.gateway.conftest import BODY, INPUT, PATHS, Shared, post
from tests.support.gateways import ENV, gateways


def test_open_sessions_calls_and_the_size_of_a_body_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calls, "MAX_CALLS", 2)
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 10_000)
    with gateways(tmp_path, sessions={"max_open": 1}) as gateway:
        url = gateway.start()
        begun = gateway.begin(url)
        key = begun["api_key"]
        start = f"{url}/rl/start_session"
        refused = post(start, gateway.key(), json={"task_id": "1"})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
        assert "max_open" in refused.text
        chat = f"{url}/v1/chat/completions"
        large = [{"role": "user", "content": "x" * 20_000}]
        for path in PATHS:
            refused = post(url + path, key, json={"messages": large})
            assert refused.status_code == 413 and "10,000 bytes" in refused.text
        many = post(chat, key, json={**BODY, "n": 3})
        assert many.status_code == 400 and many.json()["error"]["code"] == "max_calls"
        assert post(chat, key, json={**BODY, "n": 2}).status_code == 200
        assert post(chat, key, json=BODY).status_code == 400
        post(f"{url}/rl/end_session", begun["grading_key"], json={}).raise_for_status()
        assert post(start, gateway.key(), json={"task_id": "1"}).status_code == 200


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
    key = shared.grading_key if path.startswith("/rl/") else shared.key
    refused = post(shared.url + path, key, content=content, headers=headers)
    assert refused.status_code == 400 and refused.json()["error"]["message"]


def test_only_json_and_only_names_of_this_machine(shared: Shared):
    url = f"{shared.url}/rl/start_session"
    key = shared.opening_key
    plain = post(url, key, content=b'{"task_id": "1"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    assert "task_id" in post(url, key).text  # nothing was sent
    foreign = post(url, key, json={"task_id": "1"}, headers={"host": "evil.example"})
    assert foreign.status_code == 400
    assert httpx.get(f"{shared.url}/health").json() == {"status": "ok"}
    models = httpx.get(f"{shared.url}/v1/models", headers={"x-api-key": shared.key})
    assert [model["id"] for model in models.json()["data"]] == ["policy"]
    assert httpx.get(f"{shared.url}/v1/models").status_code == 401


def test_a_key_of_a_session_that_never_began_is_404(shared: Shared):
    sampling = shared.gateway.key("sample", session="unknown")
    assert post(f"{shared.url}/v1/responses", sampling, json=INPUT).status_code == 404
    grading = shared.gateway.key("grade", session="unknown")
    assert post(f"{shared.url}/rl/end_session", grading, json={}).status_code == 404


def test_a_header_leaves_a_call_out_of_training(shared: Shared):
    for word, status in (("false", 200), ("TRUE", 200), ("no", 400)):
        headers = {"x-streamrl-train": word}
        answer = post(f"{shared.url}{PATHS[0]}", shared.key, json=BODY, headers=headers)
        assert answer.status_code == status, answer.text
    assert [call.trained for call in shared.gateway.calls()[-2:]] == [False, True]
