"""What stands in front of vLLM, as the ASGI application it is: whose key opens what."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.inference.servers.inside_vllm.streamrl_guard import (
    MAX_BODY_BYTES,
    Clock,
    Guard,
    Objection,
    answers_asked,
    request_of,
)

AGENT = b"key-of-the-agent"
SAMPLER = b"key-of-the-run"
GUEST = b"key-of-the-guest"
SAMPLING = [
    "/v1/chat/completions",
    "/v1/chat/completions/render",
    "/inference/v1/generate",
    "/v1/models",
    "/metrics",
]
CONTROL = [
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weight_version",
    "/inference/v1/abort_requests",
    "/v1/load_lora_adapter",
    "/docs",
    "/",
]
TRICKS = [
    "/health/../pause",
    "/healthy",
    "//health",
    "/v1/models/../../pause",
    "/v1/modelspause",
    "/V1/models",
    "",
]


async def ask(path: str, *keys: bytes, kind: str = "http", pieces: Sequence[bytes] = ()) -> Any:
    """What is sent back; "through" when the server behind the guard was asked. The keys are sent as
    they stand, as Authorization. `pieces`: the body, as it arrives.
    """
    sent: list[Any] = []
    left = list(pieces) or [b""]

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        if pieces:
            assert (await receive())["body"] == b"".join(pieces)
            assert await receive() == {"type": "http.disconnect"}
        sent.append("through")

    async def receive() -> Any:
        known = [b"Bearer " + key for key in (AGENT, SAMPLER, GUEST)]
        assert any(key in known for key in keys) or os.environ["STREAMRL_RUN_KEYS"] == "{}", (
            "nothing of the request is read before it is known who sends it"
        )
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"accept", b"*/*"), *((b"authorization", key) for key in keys), (b"x-key", AGENT)]
    await Guard(behind)({"type": kind, "path": path, "headers": headers}, receive, send)
    return sent


async def unreached(*_: Any) -> None:
    raise AssertionError("the guard answers that itself")


async def lets(path: str, *keys: bytes) -> bool:
    answer = await ask(path, *keys)
    if answer == ["through"]:
        return True
    start, body = answer
    assert start["status"] == 401 and AGENT not in body["body"] and SAMPLER not in body["body"]
    return False


async def answered_by(guard: Guard, path: str, key: bytes, asked: bytes = b"", **more: Any) -> Any:
    """What a guard sends to a request with this key and body. `more`: of its scope."""
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": asked, "more_body": False}

    headers = [(b"authorization", b"Bearer " + key)]
    await guard({"type": "http", "path": path, "headers": headers, **more}, receive, send)
    return sent


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_AGENT_KEY", AGENT.decode())
    runs = {"own": SAMPLER.decode(), "second": GUEST.decode()}
    monkeypatch.setenv("STREAMRL_RUN_KEYS", json.dumps(runs))
    monkeypatch.setenv("STREAMRL_MAX_SAMPLES", "8")


@pytest.mark.parametrize("path", [*SAMPLING, *CONTROL, *TRICKS])
@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"Bearer ",
        b"Bearer wrong",
        AGENT,
        SAMPLER,
        b"Basic " + AGENT,
        b"Bearer " + AGENT + b"x",
    ],
)
async def test_without_a_key_there_is_nothing(path: str, key: bytes | None):
    assert not await lets(path, *([] if key is None else [key]))


@pytest.mark.parametrize("path", [*SAMPLING, *CONTROL, *TRICKS])
async def test_a_runs_key_opens_sampling_and_the_agents_everything(path: str):
    assert await lets(path, b"Bearer " + SAMPLER) == (path in SAMPLING)
    assert await lets(path, b"Bearer " + GUEST) == (path in SAMPLING)
    assert await lets(path, b"Bearer " + AGENT)


async def test_a_key_that_is_taken_back_opens_nothing_and_that_of_another_run_still_does(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("STREAMRL_RUN_KEYS", json.dumps({"own": SAMPLER.decode()}))
    assert await lets("/v1/models", b"Bearer " + SAMPLER)
    assert (await answered_by(Guard(unreached), "/v1/models", GUEST))[0]["status"] == 401


@pytest.mark.parametrize("path", [*SAMPLING, *CONTROL, *TRICKS])
async def test_a_server_without_keys_gives_answers_to_everybody_and_control_to_nobody(
    path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_RUN_KEYS", "{}")
    for sent in ([], [b"Bearer "], [b"Bearer none"]):
        assert await lets(path, *sent) == (path in SAMPLING)
    assert await lets(path, b"Bearer " + AGENT)


async def test_health_is_for_everybody_and_so_is_starting():
    assert await lets("/health") and await ask("", kind="lifespan") == ["through"]


async def test_a_websocket_is_closed():
    assert await ask("/v1/realtime", b"Bearer " + SAMPLER, kind="websocket") == [
        {"type": "websocket.close", "code": 1008}
    ]


def test_without_an_agents_key_it_does_not_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("STREAMRL_AGENT_KEY")
    with pytest.raises(KeyError):
        Guard(None)  # type: ignore[arg-type]


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ({}, 1),
        (
            {
                "messages": [
                    {"role": "user", "content": "1"},
                    {"role": "assistant", "content": None},
                ]
            },
            1,
        ),
        (user({"type": "text", "text": "1="}, "2="), 1),
        ({"prompt": "1=", "n": 8}, 8),
        ({"prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9], "n": 7}, 7),
        ({"prompt": ["1=", "2="], "n": 4}, 8),
        ({"prompt": ["1=", "2="], "n": 2, "best_of": 3}, 6),
        ({"token_ids": [1], "sampling_params": {"n": 8, "max_tokens": 10**9}, "features": None}, 8),
    ],
)
def test_what_envs_ask_for_is_answered_and_counted(body: dict[str, Any], answers: int):
    assert answers_asked(request_of(json.dumps(body).encode()), 8) == answers


@pytest.mark.parametrize(
    "body, said",
    [
        ({"n": 9}, "9 answers in one request; at most 8 are given"),
        ({"n": "9"}, "n is not a whole number"),
        ({"n": 9.0}, "n is not a whole number"),
        ({"best_of": 9}, "9 answers"),
        ({"sampling_params": {"n": 9}}, "9 answers"),
        ({"prompt": ["1="] * 3, "n": 3}, "9 answers"),
        ({"prompt": [[1]] * 9}, "9 answers"),
        (user({"type": "text", "text": "see"}, IMAGE), "this server takes text only"),
        (user({"type": "text", "text": "see", "uuid": "1", **IMAGE}), "this server takes text"),
        (user({"audio_url": "http://inside/"}), "this server takes text only"),
        ({"content_parts": [IMAGE]}, "content_parts: this server takes text and tokens only"),
        ({"features": {"mm_hashes": {}}}, "features: this server"),
        ({"prompt_embeds": "gASV"}, "prompt_embeds: this server"),
        ([], "the request is not a JSON object"),
    ],
)
def test_what_nobody_but_an_attacker_asks_for_is_refused(body: Any, said: str):
    with pytest.raises(Objection, match=re.escape(said)):
        answers_asked(request_of(json.dumps(body).encode()), 8)


def test_what_is_too_large_or_no_json_is_refused():
    with pytest.raises(Objection, match="has more than"):
        request_of(b" " * (MAX_BODY_BYTES + 1))
    for body in (b"[" * 100_000, b"n=9"):
        with pytest.raises(Objection, match="the request is not JSON"):
            request_of(body)


async def test_limits_are_for_those_who_sample_and_a_body_arrives_as_it_was_sent():
    within = [b'{"n', b'": 8}']
    beyond = [b'{"n": 9}']
    for path in ("/inference/v1/generate", "/v1/chat/completions/render"):
        assert await ask(path, b"Bearer " + SAMPLER, pieces=within) == ["through"]
        assert (await ask(path, b"Bearer " + SAMPLER, pieces=beyond))[0]["status"] == 400
        assert await ask(path, b"Bearer " + AGENT) == ["through"]
    endless = [b" " * (1 << 20)] * 40
    assert (await ask("/v1/completions", b"Bearer " + SAMPLER, pieces=endless))[0]["status"] == 400


def test_the_clock_says_what_the_time_went_to():
    clock = Clock(10.0)
    clock.advance(12.0, asked=1)  # idle for 2
    clock.advance(15.0, asked=1)  # asked for 3
    clock.advance(16.0, paused=True)  # for 1 more
    clock.advance(16.5, asked=-1)
    clock.advance(18.0, paused=False)  # paused for 2, whoever asked
    clock.advance(19.0, asked=-1)  # asked for 1
    clock.advance(24.0)
    assert clock.spent == {"idle_s": 2.0 + 5.0, "asked_s": 3.0 + 1.0 + 1.0, "paused_s": 2.0}


async def test_the_clock_counts_those_who_sample_and_the_agent_is_told():
    inside = list[tuple[int, bool]]()

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        inside.append((guard._clock.asked, guard._clock.paused))

    async def answered(path: str, key: bytes) -> Any:
        return await answered_by(guard, path, key, app=SimpleNamespace(state=state))

    async def paused(**how: Any) -> None:
        assert how == {"mode": "keep", "clear_cache": True}
        inside.append((guard._clock.asked, guard._clock.paused))

    async def cleared() -> None: ...

    engine = SimpleNamespace(
        renderer=SimpleNamespace(clear_mm_cache_async=cleared),
        engine_core=SimpleNamespace(pause_scheduler_async=paused),
    )
    state = SimpleNamespace(engine_client=engine)
    guard = Guard(behind)
    for path, key in (
        ("/inference/v1/generate", SAMPLER),
        ("/inference/v1/generate", AGENT),
        ("/v1/models", SAMPLER),
    ):
        await answered(path, key)
    assert (await answered("/streamrl/pause", AGENT))[0]["status"] == 200
    await answered("/inference/v1/generate", SAMPLER)
    await answered("/resume", AGENT)
    assert (
        inside == [(1, False), (0, False), (0, False), (0, True), (1, True), (0, True)]
        and not guard._clock.paused
    )
    _, body = await answered("/streamrl/usage", AGENT)
    usage = json.loads(body["body"])
    assert set(usage["spent"]) == {"asked_s", "paused_s", "idle_s"}
    for path in ("/streamrl/usage", "/streamrl/pause"):
        assert (await answered(path, SAMPLER))[0]["status"] == 401
    assert len(inside) == 6 and not guard._clock.paused  # refused, and not passed on


async def test_what_runs_ask_for_is_counted_by_run():
    async def vllm(scope: Any, receive: Any, send: Any) -> None: ...

    guard = Guard(vllm)
    generate = "/inference/v1/generate"
    four = b'{"token_ids": [1], "sampling_params": {"n": 4}}'
    await answered_by(guard, generate, SAMPLER, four)
    await answered_by(guard, generate, SAMPLER, four)
    await answered_by(guard, generate, GUEST, b'{"token_ids": [1]}')
    await answered_by(guard, generate, GUEST, four.replace(b"4", b"9"))  # is refused
    await answered_by(guard, generate, b"revoked", four)
    await answered_by(guard, generate, AGENT, four)
    await answered_by(guard, "/v1/chat/completions/render", GUEST, b"{}")  # samples nothing
    _, body = await answered_by(guard, "/streamrl/usage", AGENT)
    usage = json.loads(body["body"])
    assert usage["requests"] == {"own": 2, "second": 1}
    assert usage["answers"] == {"own": 8, "second": 1}


@pytest.mark.parametrize(
    ("model", "open_to"),
    [
        ("policy-7-1@own", {SAMPLER, AGENT}),
        ("policy-7-2@second", {GUEST, AGENT}),
        ("policy-7-3@third", {AGENT}),
        ("policy-7-3@", {AGENT}),
        ("policy", {SAMPLER, GUEST, AGENT}),
        (None, {SAMPLER, GUEST, AGENT}),
    ],
)
@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/chat/completions"])
async def test_adapters_of_a_run_are_sampled_with_its_own_key_only(
    path: str, model: str | None, open_to: set[bytes]
):
    asked = json.dumps({"model": model, "token_ids": [1]}).encode()
    for key in (SAMPLER, GUEST, AGENT):
        reached = list[str]()

        async def vllm(*_: Any, reached: list[str] = reached) -> None:
            reached.append("vllm")

        sent = await answered_by(Guard(vllm), path, key, asked)
        assert reached == (["vllm"] if key in open_to else [])
        assert [part["status"] for part in sent if "status" in part] == (
            [] if key in open_to else [400]
        )


async def test_a_server_without_keys_answers_for_every_adapter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STREAMRL_RUN_KEYS", "{}")
    asked = b'{"model": "policy-7-2@second"}'
    assert await ask("/v1/chat/completions", pieces=[asked]) == ["through"]


@pytest.mark.parametrize("can", [True, False])
async def test_the_probes_of_the_agent_pass_a_paused_server_that_has_the_plugin(
    monkeypatch: pytest.MonkeyPatch, can: bool
):
    """Nobody else may ask for that, and a server without the plugin stays paused altogether."""
    modes = list[dict[str, Any]]()

    async def paused(**how: Any) -> None:
        modes.append(how)

    core = SimpleNamespace(pause_scheduler_async=paused)
    state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))
    monkeypatch.setitem(sys.modules, "streamrl_probing", SimpleNamespace(admitted=can))
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    guard = Guard(unreached)
    for key in (SAMPLER, AGENT):
        scope = {
            "type": "http",
            "path": "/streamrl/admit-probes",
            "headers": [(b"authorization", b"Bearer " + key)],
            "app": SimpleNamespace(state=state),
        }
        await guard(scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [401, 200]
    assert json.loads(sent[-1]["body"]) == {"admitted": can}
    assert modes == ([{"mode": "wait", "clear_cache": False}] if can else [])
